"""Journals as the source reads them: `contract` first, then one module for each kind."""

from taskqueue_spark.journals.contract import (
    Choice,
    HistoryMissing,
    Journal,
    Range,
    ReadRange,
    Watch,
    worth,
)

__all__ = ["Choice", "HistoryMissing", "Journal", "Range", "ReadRange", "Watch", "worth"]

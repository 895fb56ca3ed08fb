"""Readers of journals: their interface (`contract`), and a module for each kind of store."""

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

"""The commands ``taskqueue pipeline …``; ``taskqueue`` finds them by the entry-point group ``taskqueue.commands``."""

from taskqueue_spark.cli.commands import add_to

__all__ = ["add_to"]

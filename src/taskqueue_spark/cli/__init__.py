"""The commands ``taskqueue pipeline``, which the entry-point group ``taskqueue.commands`` adds."""

from taskqueue_spark.cli.commands import add_to

__all__ = ["add_to"]

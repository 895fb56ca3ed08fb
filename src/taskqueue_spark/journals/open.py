"""From options to a journal."""

from __future__ import annotations

from taskqueue_spark.journals import Journal
from taskqueue_spark.options import ReadOptions, redis_settings

__all__ = ["opened"]


def opened(options: ReadOptions, *, torn: bool = False) -> Journal:
    """Return the journal that options name, as a context manager of this process.

    ``torn``: a last line without an end counts as there. Raises `ConfigurationError`.
    """
    if options.backend == "lines":
        from taskqueue_spark.journals.lines import LinesJournal  # noqa: PLC0415 - a worker loads what it needs

        return LinesJournal(options.path, torn=torn)
    from taskqueue_spark.journals.redis import RedisJournal  # noqa: PLC0415 - as above

    settings = redis_settings(options.url, options.url_env, options.prefix, options.partitions)
    return RedisJournal(settings, options.fetch)

"""The transitions that a command works on: one snapshot of a journal, kept or for the time of the command."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from taskqueue_core.config import Settings, load_settings
from taskqueue_core.errors import ConfigurationError
from taskqueue_spark.cli.options import PipelineOptions
from taskqueue_spark.cli.session import Work, installed, needed, work

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


_LITTLE = 100_000
"""transitions, below which compiling takes Spark longer than it saves"""


class Snapshotted(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot."""

    work: Work
    path: Path
    """the folder that it is in"""
    results: Path
    """the folder for what is made of it"""
    rows: int
    damaged: int
    source: dict[str, str] | None
    """options of what it was taken from just now; ``None`` if it was there before"""
    behind: dict[str, str] | None
    """options of what follows on it there"""
    options: PipelineOptions

    def transitions(self) -> DataFrame:
        """Return all of the time that is wanted, of all queues: a check needs each number of the journal."""
        from taskqueue_spark.pipeline import tables  # noqa: PLC0415 - Spark takes its time

        since, until = (None, None) if self.source else (self.options.since, self.options.until)
        return tables.read_transitions(self.work.spark, self.path, since, until)

    def of_keys(self, frame: DataFrame) -> DataFrame:
        """Return the rows of the queues that are wanted, if they are a queue's."""
        if not self.options.keys or "key" not in frame.columns:
            return frame
        return frame.where(frame.key.isin(*self.options.keys))


def source_of(options: PipelineOptions) -> dict[str, str]:
    """Return options of the source for a journal. Raises `ConfigurationError` where none is named."""
    if options.journal is not None:
        source = {"backend": "lines", "path": str(options.journal.expanduser().absolute())}
    else:
        name = options.backend or load_settings(Settings).backend
        name = name.removeprefix("taskqueue_").partition(":")[0]
        path = os.environ.get("TASKQUEUE_MEMORY_JOURNAL")
        if name == "redis":
            source = store_options()
        elif name == "memory" and path:
            source = {"backend": "lines", "path": str(Path(path).absolute())}
        else:
            raise ConfigurationError(
                "no journal given; set --journal FILE (journal file of a memory backend), "
                "--from DIR (written by an earlier --out), or --backend redis"
            )
    for name, moment in (("startingTimestamp", options.since), ("endingTimestamp", options.until)):
        if moment is not None:
            source[name] = moment.isoformat()
    return source


def store_options() -> dict[str, str]:
    """Return options for the Redis of the settings, so that every process of Spark finds it.

    But for a URL with a password, which Spark would show: that is for the processes' own environments.
    Raises `ConfigurationError`.
    """
    with needed():
        from taskqueue_redis.config import RedisSettings  # noqa: PLC0415 - it may not be installed
    settings = load_settings(RedisSettings)
    options = {"backend": "redis"}
    if "url" in settings.model_fields_set and not settings.address.password:
        options["url"] = settings.url.get_secret_value()
    if "prefix" in settings.model_fields_set:
        options["prefix"] = settings.prefix
    if settings.partitions is not None:
        options["partitions"] = str(settings.partitions)
    return options


def _little(source: dict[str, str] | None, options: PipelineOptions) -> bool:
    """Whether there are few transitions, which is known before Spark has started."""
    from taskqueue_spark.batch_reader import fewer  # noqa: PLC0415
    from taskqueue_spark.options import ReadOptions  # noqa: PLC0415 - Spark takes its time
    from taskqueue_spark.pipeline import tables  # noqa: PLC0415

    if source is None:
        return tables.rows(options.saved or Path(), "transitions") < _LITTLE
    return fewer(ReadOptions.of(source), _LITTLE)


@contextmanager
def taken(options: PipelineOptions, *, makes: bool = False) -> Iterator[Snapshotted]:
    """Start Spark and take a snapshot, unless there is one (``--from``). ``makes``: tables are made of it.

    Raises `ConfigurationError`, `BackendUnavailable` and `SparkFailed`.
    """
    source = None if options.saved else source_of(options)
    if options.saved is not None and not (options.saved.expanduser() / "transitions").is_dir():
        raise ConfigurationError(f"there is no table transitions in {options.saved}")
    if options.out is None and options.elsewhere and (makes or source is not None):
        raise ConfigurationError(
            "--master, --remote: need --out DIR, a folder that every machine sees under the same path"
        )
    installed()
    with needed():
        from taskqueue_spark.pipeline import tables  # noqa: PLC0415 - it imports Spark
    if options.out is not None:
        tables.folder(options.out)
    with (
        work(options, little=_little(source, options)) as spark,
        tempfile.TemporaryDirectory(prefix="taskqueue-snapshot-") as folder,
    ):
        results = path = options.out or Path(folder)
        behind = None
        if source is None:
            path = options.saved or path
            rows, damaged = (tables.rows(path, name) for name in ("transitions", "damaged"))
        else:
            rows, damaged, behind = take(spark, source, path)
        yield Snapshotted(
            work=spark,
            path=path,
            results=results,
            rows=rows,
            damaged=damaged,
            source=source,
            behind=behind,
            options=options,
        )


def take(running: Work, source: dict[str, str], place: Path) -> tuple[int, int, dict[str, str]]:
    """Take a snapshot; return how many transitions it has, how much was damaged, and options of what follows on it."""
    from taskqueue_spark.batch_reader import pinned, read_journal  # noqa: PLC0415
    from taskqueue_spark.columns import distinct  # noqa: PLC0415 - Spark takes its time
    from taskqueue_spark.options import ReadOptions  # noqa: PLC0415
    from taskqueue_spark.pipeline import tables  # noqa: PLC0415

    with running.stages.stage("read the journal") as stage:
        end = pinned(ReadOptions.of(source))
        journal = read_journal(running.spark, source | {"endingOffsets": end}, pin=False)
        # Files may have been copied beside one another; a store tells each transition once.
        journal = distinct(journal) if source["backend"] == "lines" else journal
        snapshot = tables.snapshot(journal, place)
        stage.note = f"{snapshot.transitions:,} transitions"
        if snapshot.damaged:
            stage.note += f", {snapshot.damaged:,} damaged"
    behind = {name: value for name, value in source.items() if not name.endswith("Timestamp")}
    until = source.get("endingTimestamp")
    behind |= {"startingTimestamp": until} if until else {"startingOffsets": end}
    return snapshot.transitions, snapshot.damaged, behind | {"failOnDataLoss": "false"}

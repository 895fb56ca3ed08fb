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
from taskqueue_spark.cli.options import Wanted
from taskqueue_spark.cli.session import Work, installed, needed, work

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["Taken", "source_of", "store_options", "take", "taken"]

_LITTLE = 100_000
"""transitions, below which compiling takes Spark longer than it saves"""


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot."""

    work: Work
    place: Path
    """the folder that it is in"""
    results: Path
    """the folder for what is made of it"""
    rows: int
    damaged: int
    source: dict[str, str] | None
    """options of what it was taken from just now; ``None`` if it was there before"""
    behind: dict[str, str] | None
    """options of what follows on it there"""
    wanted: Wanted

    def transitions(self) -> DataFrame:
        """Return all of the time that is wanted, of all queues: a check needs each number of the journal."""
        from taskqueue_spark.pipeline import tables  # noqa: PLC0415 - Spark takes its time

        since, until = (None, None) if self.source else (self.wanted.since, self.wanted.until)
        return tables.read_transitions(self.work.spark, self.place, since, until)

    def of_keys(self, frame: DataFrame) -> DataFrame:
        """Return the rows of the queues that are wanted, if they are a queue's."""
        if not self.wanted.keys or "key" not in frame.columns:
            return frame
        return frame.where(frame.key.isin(*self.wanted.keys))


def source_of(wanted: Wanted) -> dict[str, str]:
    """Return options of the source for a journal. Raises `ConfigurationError` where none is named."""
    if wanted.journal is not None:
        options = {"backend": "lines", "path": str(wanted.journal.expanduser().absolute())}
    else:
        word = wanted.backend or load_settings(Settings).backend
        name = word.removeprefix("taskqueue_").partition(":")[0]
        path = os.environ.get("TASKQUEUE_MEMORY_JOURNAL")
        if name == "redis":
            options = store_options()
        elif name == "memory" and path:
            options = {"backend": "lines", "path": str(Path(path).absolute())}
        else:
            raise ConfigurationError(
                "which journal? Allowed: --journal FILE (lines of a memory backend), --from DIR (what --out was "
                "before), or --backend redis"
            )
    for name, moment in (("startingTimestamp", wanted.since), ("endingTimestamp", wanted.until)):
        if moment is not None:
            options[name] = moment.isoformat()
    return options


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


def _little(source: dict[str, str] | None, wanted: Wanted) -> bool:
    """Whether there are few transitions, which is known before Spark has started."""
    from taskqueue_spark.batch_reader import fewer  # noqa: PLC0415
    from taskqueue_spark.options import ReadOptions  # noqa: PLC0415 - Spark takes its time
    from taskqueue_spark.pipeline import tables  # noqa: PLC0415

    if source is None:
        return tables.rows(wanted.saved or Path(), "transitions") < _LITTLE
    return fewer(ReadOptions.of(source), _LITTLE)


@contextmanager
def taken(wanted: Wanted, *, makes: bool = False) -> Iterator[Taken]:
    """Start Spark and take a snapshot, unless there is one (``--from``). ``makes``: tables are made of it.

    Raises `ConfigurationError`, `BackendUnavailable` and `SparkFailed`.
    """
    source = None if wanted.saved else source_of(wanted)
    if wanted.saved is not None and not (wanted.saved.expanduser() / "transitions").is_dir():
        raise ConfigurationError(f"there is no table transitions in {wanted.saved}")
    if wanted.out is None and wanted.elsewhere and (makes or source is not None):
        raise ConfigurationError(
            "--master, --remote: need --out DIR, a folder that every machine sees under the same path"
        )
    installed()
    with needed():
        from taskqueue_spark.pipeline import tables  # noqa: PLC0415 - it imports Spark
    if wanted.out is not None:
        tables.folder(wanted.out)
    with (
        work(wanted, little=_little(source, wanted)) as spark,
        tempfile.TemporaryDirectory(prefix="taskqueue-snapshot-") as folder,
    ):
        results = place = wanted.out or Path(folder)
        behind = None
        if source is None:
            place = wanted.saved or place
            rows, damaged = (tables.rows(place, name) for name in ("transitions", "damaged"))
        else:
            rows, damaged, behind = take(spark, source, place)
        yield Taken(
            work=spark,
            place=place,
            results=results,
            rows=rows,
            damaged=damaged,
            source=source,
            behind=behind,
            wanted=wanted,
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
        found = tables.snapshot(journal, place)
        stage.said = f"{found.transitions:,} transitions"
        if found.damaged:
            stage.said += f", {found.damaged:,} damaged"
    behind = {name: value for name, value in source.items() if not name.endswith("Timestamp")}
    until = source.get("endingTimestamp")
    behind |= {"startingTimestamp": until} if until else {"startingOffsets": end}
    return found.transitions, found.damaged, behind | {"failOnDataLoss": "false"}

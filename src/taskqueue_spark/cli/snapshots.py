"""The snapshot of a journal that a command reads.

It is the snapshot that ``--from`` names, or a new one in the folder of ``--out`` or in a temporary folder.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from taskqueue_core.config import Settings, load_settings
from taskqueue_core.errors import ConfigurationError
from taskqueue_spark.cli.options import PipelineOptions
from taskqueue_spark.cli.session import Work, check_installed, explain_missing_modules, work
from taskqueue_spark.cli.spark_types import DataFrame

_SMALL = 100_000
"""number of transitions below which Java's compiler costs more time than it saves"""


class OpenSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a journal, with the Spark session that reads it."""

    work: Work
    path: Path
    """folder of the snapshot"""
    results: Path
    """folder for the results"""
    rows: int
    damaged: int
    source: dict[str, str] | None
    """options of the data source for the journal that was read; ``None`` with ``--from``"""
    behind: dict[str, str] | None
    """options of the data source for the transitions after the snapshot; ``None`` with ``--from``"""
    options: PipelineOptions

    def transitions(self) -> DataFrame:
        """Return the transitions from ``--since`` to ``--until``.

        ``--key`` has no effect here, because checks for gaps need every number.
        """
        from taskqueue_spark.pipeline import tables  # noqa: PLC0415 - imports Spark, which is slow

        since, until = (None, None) if self.source else (self.options.start, self.options.end)
        return tables.read_transitions(self.work.spark, self.path, since, until)

    def of_keys(self, frame: DataFrame) -> DataFrame:
        """Return the rows of the queues that ``--key`` names; all rows if the frame has no column ``key``."""
        if not self.options.keys or "key" not in frame.columns:
            return frame
        return frame.where(frame.key.isin(*self.options.keys))


def backend_name(option: str | None) -> str:
    """Return the short name, such as ``redis``, of the backend that ``option`` names, or else of the configured one."""
    name = option or load_settings(Settings).backend
    return name.removeprefix("taskqueue_").partition(":")[0]


def source_of(options: PipelineOptions) -> dict[str, str]:
    """Return the options of the data source for the journal. Raises `ConfigurationError` if no journal is named."""
    path = options.journal and str(options.journal.expanduser().absolute())
    name = backend_name(options.backend) if path is None else "memory"
    if path is None and (variable := os.environ.get("TASKQUEUE_MEMORY_JOURNAL")):
        path = str(Path(variable).absolute())
    if name == "redis":
        source = store_options()
    elif name == "memory" and path:
        source = {"backend": "lines", "path": path}
    else:
        raise ConfigurationError(
            "no journal given; set --journal FILE (journal file of a memory backend), "
            "--from DIR (written earlier with --out), or --backend redis"
        )
    for name, moment in (("startingTimestamp", options.start), ("endingTimestamp", options.end)):
        if moment is not None:
            source[name] = moment.isoformat()
    return source


def store_options() -> dict[str, str]:
    """Return the options of the configured Redis, so that every process of Spark finds it.

    A URL with a password is not included, because Spark would show it; each process reads it from its environment.
    Raises `ConfigurationError`.
    """
    with explain_missing_modules():
        from taskqueue_redis.config import RedisSettings  # noqa: PLC0415 - the package may not be installed
    settings = load_settings(RedisSettings)
    options = {"backend": "redis"}
    if "url" in settings.model_fields_set and not settings.address.password:
        options["url"] = settings.url.get_secret_value()
    if "prefix" in settings.model_fields_set:
        options["prefix"] = settings.prefix
    if settings.partitions is not None:
        options["partitions"] = str(settings.partitions)
    return options


@contextmanager
def open_snapshot(options: PipelineOptions, *, writes: bool = False) -> Iterator[OpenSnapshot]:
    """Start Spark, and take a snapshot unless ``--from`` names one. ``writes``: whether the command writes results.

    Raises `InvalidInput`, `ConfigurationError`, `BackendUnavailable` and `SparkFailed`.
    """
    saved = options.saved
    source = None if saved else source_of(options)
    if saved is not None and not (saved.expanduser() / "transitions").is_dir():
        raise ConfigurationError(
            f"--from: there is no table named transitions in {saved}; name a folder written with --out"
        )
    if options.out is None and options.distributed and (writes or source is not None):
        raise ConfigurationError(
            "--master and --remote need --out DIR, a folder that every machine sees under the same path"
        )
    check_installed()
    with explain_missing_modules():
        from taskqueue_spark.batch_reader import has_fewer_rows  # noqa: PLC0415 - imports Spark, which is slow
        from taskqueue_spark.options import ReadOptions  # noqa: PLC0415
        from taskqueue_spark.pipeline import tables  # noqa: PLC0415
    if options.out is not None:
        tables.folder(options.out)
    if source is None:
        small = tables.rows(saved or Path(), "transitions") < _SMALL
    else:
        small = has_fewer_rows(ReadOptions.of(source), _SMALL)
    with (
        work(options, small=small) as running,
        tempfile.TemporaryDirectory(prefix="taskqueue-snapshot-") as folder,
    ):
        results = path = options.out or Path(folder)
        behind = None
        if source is None:
            path = saved or path
            rows, damaged = (tables.rows(path, name) for name in ("transitions", "damaged"))
        else:
            rows, damaged, behind = _take_snapshot(running, source, path)
        yield OpenSnapshot(
            work=running,
            path=path,
            results=results,
            rows=rows,
            damaged=damaged,
            source=source,
            behind=behind,
            options=options,
        )


def _take_snapshot(
    running: Work, source: dict[str, str], path: Path
) -> tuple[int, int, dict[str, str]]:
    """Write a snapshot. Return its numbers of transitions and damaged entries, and options to read what follows it."""
    from taskqueue_spark.batch_reader import pinned, read_journal  # noqa: PLC0415 - imports Spark, which is slow
    from taskqueue_spark.options import ReadOptions  # noqa: PLC0415
    from taskqueue_spark.pipeline import tables  # noqa: PLC0415

    with running.stages.stage("read the journal") as stage:
        end = pinned(ReadOptions.of(source))
        journal = read_journal(running.spark, source | {"endingOffsets": end}, pin=False)
        # A folder of journal files may contain copies of a file; Redis returns each transition once.
        journal = tables.distinct(journal) if source["backend"] == "lines" else journal
        snapshot = tables.snapshot(journal, path)
        stage.note = (
            f"{snapshot.transitions:,} transition{'' if snapshot.transitions == 1 else 's'}"
        )
        if snapshot.damaged:
            stage.note += f", {snapshot.damaged:,} damaged"
    behind = {name: value for name, value in source.items() if not name.endswith("Timestamp")}
    until = source.get("endingTimestamp")
    behind |= {"startingTimestamp": until} if until else {"startingOffsets": end}
    return snapshot.transitions, snapshot.damaged, behind | {"failOnDataLoss": "false"}

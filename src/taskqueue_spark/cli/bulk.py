"""``taskqueue pipeline load|redrive``: publish tasks from files, and redrive dead letters in bulk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from taskqueue_core.config import Settings, load_settings
from taskqueue_core.errors import ConfigurationError, InvalidInput
from taskqueue_spark.cli.options import EngineOptions, PipelineOptions, option
from taskqueue_spark.cli.output import print_counts
from taskqueue_spark.cli.session import work
from taskqueue_spark.cli.snapshots import backend_name, open_snapshot, store_options
from taskqueue_spark.cli.spark_types import DataFrame, SparkSession

_FORMATS = {
    ".parquet": "parquet", ".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv",
}  # fmt: skip
_CASTS = {
    "priority": "int", "max_attempts": "int", "deadline": "timestamp", "not_before": "timestamp",
}  # fmt: skip


def load(
    options: EngineOptions,
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="File to load, or folder of files in one format.")
    ],
    *,
    queue: Annotated[str | None, option("KEY", "Queue for rows that do not name one.")] = None,
    id_column: Annotated[
        str, typer.Option("--id", metavar="COLUMN", help="Column with a unique id for each row.")
    ] = "task_id",
    kind: Annotated[
        Literal["parquet", "json", "csv"] | None,
        typer.Option("--format", help="File format. Default: by extension.", show_default=False),
    ] = None,
    backend: Annotated[
        str | None, option("NAME", "Name of the backend. Default: TASKQUEUE_BACKEND.")
    ] = None,
    wait: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds to wait without progress while a queue is full or the store is down.",
        ),
    ] = 3600.0,
    skip_invalid: Annotated[
        Path | None,
        option("DIR", "Skip invalid rows, and write them to this folder."),
    ] = None,
) -> None:
    """Publish the rows of a Parquet, JSON-lines or CSV file as tasks.

    Columns named task_id, key, payload, headers, priority, tenant, ordering_key, deadline, not_before and max_attempts
    are the fields of a task. Without a payload column, all other columns become the payload, as one JSON object.
    The command can be run again, even after a crash: an id that was published is not published again while its task
    exists, or during the queue's dedupe_window afterwards.
    """
    reader = kind or _FORMATS.get(path.suffix.lower())
    if reader is None:
        allowed = "a name that ends in .parquet, .json, .jsonl, .ndjson or .csv, or --format"
        raise InvalidInput("FILE", "a file name without a known extension", allowed)
    with work(options) as running:
        from taskqueue_spark.sink.writer import publish  # noqa: PLC0415 - imports Spark, which is slow

        sink = _store(backend) | {"wait": str(wait)}
        if queue is not None:
            sink["queue"] = queue
        if skip_invalid is not None:
            folder = skip_invalid.expanduser().absolute()
            sink |= {"onInvalid": "skip", "invalidPath": str(folder)}
        with running.stages.stage("publish") as stage:
            sent = publish(as_tasks(_read(running.spark, path, reader), id_column), **sink)
            stage.note = f"{sent.confirmed:,} confirmed"
    names = ("confirmed", "duplicate", "conflict", "invalid")
    print_counts({name: getattr(sent, name) for name in names}, as_json=options.as_json)


def _read(spark: SparkSession, path: Path, kind: str) -> DataFrame:
    folder = path.expanduser().absolute()
    if not folder.exists():
        raise InvalidInput("FILE", "a path that does not exist", "a file, or a folder of files")
    reader = spark.read.option("header", value=True) if kind == "csv" else spark.read
    return reader.format(kind).load(f"file://{folder}")


def as_tasks(rows: DataFrame, id_column: str) -> DataFrame:
    """Return rows with the columns that the sink expects. Raises `InvalidInput` if ``id_column`` does not exist."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - Spark's documentation uses the name F

    from taskqueue_spark.sink.tasks import COLUMNS  # noqa: PLC0415

    if id_column not in rows.columns:
        allowed = "a column with a unique id for each row, so that no row is published twice"
        raise InvalidInput("--id", "an unknown column", allowed)
    rows = rows.withColumn("task_id", F.col(f"`{id_column}`").cast("string"))
    types = dict(rows.dtypes)
    columns = [
        F.col(name).cast(_CASTS[name]).alias(name)
        if types[name] == "string" and name in _CASTS
        else F.col(name)
        for name in COLUMNS
        if name in types and name != "payload"
    ]
    others = [F.col(f"`{name}`") for name in rows.columns if name not in COLUMNS]
    if "payload" in types:
        plain = types["payload"] in {"string", "binary"}
        columns.append(F.col("payload") if plain else F.to_json("payload").alias("payload"))
    elif others:
        whole = F.to_json(F.struct(*others), {"ignoreNullFields": "false"})
        columns.append(whole.alias("payload"))
    return rows.select(*columns)


def redrive(
    options: PipelineOptions,
    fingerprints: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FINGERPRINT]...",
            help="Fingerprints of failures, as `taskqueue pipeline failures` prints them.",
            show_default=False,
        ),
    ] = None,
    *,
    everything: Annotated[bool, typer.Option("--all", help="Redrive all dead letters.")] = False,
    discard: Annotated[
        bool, typer.Option("--discard", help="Discard the dead letters instead of redriving them.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only count the dead letters.")
    ] = False,
) -> None:
    """Redrive the dead letters of the given failures, or all dead letters with --all.

    The command finds the dead letters in the journal. The store skips tasks that are no longer dead letters, so it is
    safe to run the command again.
    """
    if bool(fingerprints) == everything:
        raise ConfigurationError("redrive: needs either fingerprints of failures or --all")
    with open_snapshot(options) as opened:
        from taskqueue_spark.pipeline.failures import redrive_list  # noqa: PLC0415 - imports Spark, which is slow
        from taskqueue_spark.redrive import redrive as redrive_rows  # noqa: PLC0415

        rows = opened.of_keys(redrive_list(opened.transitions(), *(fingerprints or ())))
        with opened.work.stages.stage("find dead letters") as stage:
            count = rows.count()
            stage.note = f"{count:,} in the journal"
        counts = {"found": count}
        if not dry_run:
            verb = "discard" if discard else "redrive"
            store = _store("redis" if (opened.source or {}).get("backend") == "redis" else None)
            with opened.work.stages.stage(verb) as stage:
                result = redrive_rows(rows, **store, action=verb)
                stage.note = f"{result.moved:,}"
            done = "discarded" if discard else "redriven"
            counts |= {done: result.moved, "passed": result.passed}
    print_counts(counts, as_json=options.as_json)


def _store(option: str | None) -> dict[str, str]:
    """Return data source options for the named or configured store. The memory backend is used through its server."""
    name = backend_name(option)
    if name == "redis":
        return store_options()
    return {"backend": "server" if name == "memory" else option or load_settings(Settings).backend}

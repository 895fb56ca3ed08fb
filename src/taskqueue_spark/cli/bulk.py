"""``taskqueue pipeline load|redrive``: tasks in bulk, into a queue and back from the dead letters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from taskqueue_cli.output import console, paragraphs, print_json
from taskqueue_core.config import Settings, load_settings
from taskqueue_core.errors import ConfigurationError, InvalidInput
from taskqueue_spark.cli.options import Engine, PipelineOptions, engine, options, with_options
from taskqueue_spark.cli.session import work
from taskqueue_spark.cli.snapshots import store_options, taken

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_FORMATS = {
    ".parquet": "parquet",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
}
_CASTS = {
    "priority": "int",
    "max_attempts": "int",
    "deadline": "timestamp",
    "not_before": "timestamp",
}
_BackendWord = Annotated[
    str | None,
    typer.Option(metavar="WORD", help="Backend. Default: TASKQUEUE_BACKEND.", show_default=False),
]


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(name="load", help=paragraphs(load.__doc__))(with_options(engine)(load))
    app.command(name="redrive", help=paragraphs(redrive.__doc__))(with_options(options)(redrive))


def load(
    asked: Engine,
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="File, or folder with files of one format.")
    ],
    *,
    queue: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Queue of rows without a key column.", show_default=False),
    ] = None,
    id_column: Annotated[
        str, typer.Option("--id", metavar="COLUMN", help="Column with a unique id for each row.")
    ] = "task_id",
    kind: Annotated[
        Literal["parquet", "json", "csv"] | None,
        typer.Option("--format", help="Default: from the file extension.", show_default=False),
    ] = None,
    backend: _BackendWord = None,
    wait: Annotated[
        float, typer.Option(min=0, help="Maximum seconds to wait while a full queue has no room.")
    ] = 3600.0,
    skip_invalid: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for invalid rows; the load continues without them.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Publish the rows of a Parquet, JSON-lines or CSV file as tasks.

    Columns named task_id, key, payload, headers, priority, tenant, ordering_key, deadline, not_before and max_attempts
    are the task's; if there is no payload, all others become it, as one JSON object. Doing it again, or going on after
    a crash, publishes nothing twice: each id once, while its task lives and for the queue's dedupe_window after.
    """
    reader = kind or _format_of(path)
    with work(asked) as running:
        from taskqueue_spark.sink.writer import publish  # noqa: PLC0415 - Spark takes its time

        options = _store(backend) | {"wait": str(wait)}
        options |= {} if queue is None else {"queue": queue}
        if skip_invalid is not None:
            options |= {
                "onInvalid": "skip",
                "invalidPath": str(skip_invalid.expanduser().absolute()),
            }
        with running.stages.stage("publish") as stage:
            rows = as_tasks(read(running.spark, path, reader), id_column)
            sent = publish(rows, **options)
            stage.note = f"{sent.confirmed:,} confirmed"
    counts = {
        name: getattr(sent, name) for name in ("confirmed", "duplicate", "conflict", "invalid")
    }
    if asked.as_json:
        print_json(counts)
    else:
        console.print(" · ".join(f"{name} {count:,}" for name, count in counts.items()))


def read(spark: SparkSession, path: Path, kind: str) -> DataFrame:
    """Read a file. Raises `InvalidInput` where there is none."""
    folder = path.expanduser().absolute()
    if not folder.exists():
        raise InvalidInput("FILE", "a path that does not exist", "a file, or a folder of files")
    reader = spark.read.option("header", value=True) if kind == "csv" else spark.read
    return reader.format(kind).load(f"file://{folder}")


def as_tasks(rows: DataFrame, id_column: str) -> DataFrame:
    """Return rows as the sink takes them. Raises `InvalidInput` where no column names them."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - as everybody calls it

    from taskqueue_spark.sink.tasks import COLUMNS  # noqa: PLC0415

    if id_column not in rows.columns:
        raise InvalidInput(
            "--id",
            "an unknown column",
            "a column with a unique id for each row, so that none is published twice",
        )
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
    asked: PipelineOptions,
    fingerprints: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FINGERPRINT]...",
            help="Fingerprints of failures, as `taskqueue pipeline failures` prints them.",
            show_default=False,
        ),
    ] = None,
    *,
    everything: Annotated[bool, typer.Option("--all", help="All failures.")] = False,
    discard: Annotated[
        bool, typer.Option("--discard", help="Discard the dead letters instead.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only count the dead letters.")
    ] = False,
) -> None:
    """Have dead tasks tried again, in bulk: those that died of one failure, or all of them.

    The journal tells which; the store has the last word, so doing it again does nothing to tasks that live by then.
    """
    if bool(fingerprints) == everything:
        raise ConfigurationError("redrive: name fingerprints of failures, or set --all")
    with taken(asked) as shot:
        from taskqueue_spark.pipeline.failures import redrive_list  # noqa: PLC0415 - Spark takes its time
        from taskqueue_spark.redrive import redrive as moved_by  # noqa: PLC0415

        result = shot.of_keys(redrive_list(shot.transitions(), *(fingerprints or ())))
        with shot.work.stages.stage("look for them") as stage:
            count = result.count()
            stage.note = f"{count:,} dead by the journal"
        told_of = {"found": count}
        if not dry_run:
            verb = "discard" if discard else "redrive"
            store = _store("redis" if (shot.source or {}).get("backend") == "redis" else None)
            with shot.work.stages.stage(verb) as stage:
                moved = moved_by(result, **store, action=verb)
                stage.note = f"{moved.moved:,}"
            told_of |= {f"{verb}ed" if discard else "redriven": moved.moved, "passed": moved.passed}
    if asked.as_json:
        print_json(told_of)
    else:
        console.print(" · ".join(f"{name} {number:,}" for name, number in told_of.items()))


def _store(token: str | None) -> dict[str, str]:
    """Return options for a store that processes share: the one that is named or configured, or else the server."""
    token = token or load_settings(Settings).backend
    name = token.removeprefix("taskqueue_").partition(":")[0]
    if name == "redis":
        return store_options()
    return {"backend": "server" if name == "memory" else token}


def _format_of(path: Path) -> str:
    name = _FORMATS.get(path.suffix.lower())
    if name is None:
        raise InvalidInput(
            "FILE", "a file name without a known extension", "--format, or .parquet, .jsonl or .csv"
        )
    return name

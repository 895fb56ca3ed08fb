"""The commands ``taskqueue pipeline snapshot|audit|history|latency|throughput|fairness|failures|capacity``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import msgspec
import typer
from rich.text import Text

from taskqueue_cli.output import FAILED, console, print_json
from taskqueue_core.errors import ConfigurationError
from taskqueue_spark.cli.options import PipelineOptions, option
from taskqueue_spark.cli.output import print_outcome, print_table
from taskqueue_spark.cli.session import explain_missing_modules
from taskqueue_spark.cli.snapshots import OpenSnapshot, open_snapshot, store_options
from taskqueue_spark.cli.spark_types import DataFrame, ReportBuild

Window = Annotated[
    str | None,
    option("TIME", "Show values per time window of this length, such as '30 seconds'. Default: only totals."),
]  # fmt: skip
Live = Annotated[
    bool | None,
    typer.Option(
        "--live/--no-live",
        help="Look up unfinished tasks in the store. Default: only if the journal is read from Redis without --until.",
        show_default=False,
    ),
]
Grace = Annotated[
    float,
    typer.Option(
        help="Report a task as lost if the store does not have it this many seconds after its last event."
    ),
]
TargetWait = Annotated[float, typer.Option(help="Target for a task's waiting time, in seconds.")]
Percentile = Annotated[
    float, typer.Option(help="Share of tasks, from 0.5 to 0.999, that must meet the target.")
]


@contextmanager
def snapshot_tables(
    options: PipelineOptions, *, live: bool | None = False, **wishes: Any
) -> Iterator[tuple[OpenSnapshot, ReportBuild]]:
    """Open a snapshot, and yield it with a builder of tables.

    ``live``: whether to query the store; ``None``: query it if the journal is in Redis and read to its end. ``wishes``:
    parameters of the tables. Raises the errors of `open_snapshot`, and `InvalidInput` for invalid ``wishes`` before
    Spark starts.
    """
    with explain_missing_modules():
        from taskqueue_spark.report import build  # noqa: PLC0415 - imports Spark, which is slow
    checked = build.Wishes(**wishes, whole=options.start is None)
    with open_snapshot(options, writes=True) as opened:
        from_redis = opened.source is not None and opened.source["backend"] == "redis"
        if live and not from_redis:
            raise ConfigurationError("--live: needs a journal that is read from Redis")
        query = from_redis and options.end is None if live is None else live
        store = store_options() if query else None
        checked = msgspec.structs.replace(checked, store=store, behind=opened.behind)
        yield (
            opened,
            build.ReportBuild(opened.transitions(), opened.results, checked, opened.of_keys),
        )


def snapshot(options: PipelineOptions) -> None:
    """Store the journal as Parquet: DIR/transitions by date, and DIR/damaged with entries that cannot be read.

    Other commands read the snapshot with --from DIR. A second run replaces the snapshot with the current journal.
    """
    if options.out is None or options.saved is not None:
        raise ConfigurationError("snapshot: needs --out DIR, and does not accept --from")
    if options.keys:
        raise ConfigurationError(
            "snapshot: does not accept --key, because a snapshot always contains every queue; "
            "pass --key to the commands that read it"
        )
    with open_snapshot(options) as opened:
        if options.as_json:
            counts = {"transitions": opened.rows, "damaged": opened.damaged}
            print_json({"out": str(options.out)} | counts)
            return
        console.print(f"transitions in [bold]{options.out}[/]: {opened.rows:,}", highlight=False)
        if opened.damaged:
            console.print(
                f"[yellow]entries that could not be read: {opened.damaged:,}; see the subfolder 'damaged'"
            )


def audit(options: PipelineOptions, *, live: Live = None, grace: Grace = 60.0) -> None:
    """Check that no task was lost: each published task has ended, or is still in the store.

    Each life of a task, from its publish to its end, has one verdict, and the counts of the verdicts must balance. The
    exit code is 1 if they do not, if a task is lost, or if a task has an impossible history, for example two ends. If
    part of the journal is missing and no fault was found, the result is "unknown", not "no loss".
    """
    with snapshot_tables(options, live=live, grace=grace) as (opened, build):
        from taskqueue_spark.report.content import audit_content  # noqa: PLC0415 - imports Spark, which is slow

        with opened.work.stages.stage("audit"):
            content = audit_content(build, opened.damaged)
    outcome = content.outcome()
    if options.as_json:
        fields = msgspec.to_builtins(content, builtin_types=[])
        print_json({"ok": outcome.ok, "verdict": outcome, **fields})
    else:
        print_outcome(outcome)
        for sentence in outcome.sentences:
            console.print(Text(f"  {sentence}"))
        if rows := content.conservation:
            always = ("key", "published", "completed", "lost", "balanced", "complete")
            names = [name for name in rows[0] if name in always or content.total.get(name)]
            print_table(rows, names, of=content.total["queues"])
    if not outcome.ok:
        raise typer.Exit(FAILED)


def history(options: PipelineOptions) -> None:
    """Check the history of every task against the rules R0 to R13, and count the violations of each rule.

    The exit code is 1 if a rule was broken, if different transitions have the same number, or if the journal was
    altered or has damaged entries only.
    """
    with snapshot_tables(options) as (opened, build):
        from taskqueue_spark.pipeline.digests import check_digests  # noqa: PLC0415 - imports Spark, which is slow
        from taskqueue_spark.pipeline.tables import first_rows  # noqa: PLC0415
        from taskqueue_spark.report.content import is_readable  # noqa: PLC0415

        with opened.work.stages.stage("history"):
            counts = first_rows(build.table("rules"))
            broken = first_rows(build.table("violations"), "rule", "key", "run", "shard", "seq")
            doubtful = build.table("contradictions").count()
            digests = check_digests(build.transitions)
            altered = digests.altered if digests else 0
            unreadable = bool(opened.damaged) and not is_readable(build.transitions)
    total = sum(row["count"] for row in counts)
    counts.sort(key=lambda row: int(row["rule"].strip("R") or 0))
    if options.as_json:
        fields = {
            "contradictory": doubtful,
            "altered": altered,
            "damaged": opened.damaged,
            "rules": counts,
            "violations": broken,
        }
        print_json(
            {"ok": not (total or doubtful or altered or unreadable), "count": total, **fields}
        )
    else:
        print_table(counts, ("rule", "count"))
        if broken:
            print_table(broken, ("rule", "key", "task_id", "seq", "text"), of=total)
        if doubtful:
            console.print(f"[bold red]numbers shared by different transitions: {doubtful:,}")
        if altered:
            console.print(f"[bold red]transitions whose digest does not match: {altered:,}")
        if unreadable:
            console.print(
                f"[bold red]no entry of the journal can be read; damaged: {opened.damaged:,}"
            )
    if total or doubtful or altered or unreadable:
        raise typer.Exit(FAILED)


def latency(
    options: PipelineOptions,
    *,
    window: Window = None,
    classes: Annotated[
        bool, typer.Option("--classes", help="Split by priority and tenant.")
    ] = False,
) -> None:
    """Show how long tasks waited, ran, and took in total: p50, p95 and p99, in seconds."""
    split = ("priority", "tenant") if classes else ()
    kinds = ("queue_wait", "run", "end_to_end")
    names = ("tasks", *(f"{kind}_{name}" for kind in kinds for name in ("p50", "p95", "p99")))
    order = ("key", *split, *(("window_start",) if window else ()))
    _table(
        options, "latency", (*order, *names), order, window=window,
        make=lambda pipeline, rows: pipeline.latency.latency(rows, window, by=split),
    )  # fmt: skip


def throughput(options: PipelineOptions, *, window: Window = None) -> None:
    """Count the events of each kind, in total and per second."""
    columns = (
        "key", *(("window_start",) if window else ()), "seconds", "published", "delivered", "acked", "retried",
        "redelivered", "lost", "dead_lettered", "acked_per_second",
    )  # fmt: skip
    _table(
        options, "throughput", columns, ("key", "window_start"), window=window,
        make=lambda pipeline, rows: pipeline.throughput.throughput(rows, window),
    )  # fmt: skip


def fairness(
    options: PipelineOptions,
    *,
    by: Annotated[
        Literal["tenant", "worker"],
        typer.Option(help="Compare tenants or workers with each other."),
    ] = "tenant",
    window: Annotated[
        str, typer.Option(help="Length of the time windows for the comparison.")
    ] = "1 minute",
) -> None:
    """Show how evenly competing tenants or workers received deliveries, as Jain's index; 1 is perfectly even."""
    columns = ("key", "windows", "jain", "jain_lowest", "members", "deliveries", "jain_total")
    _table(
        options, "fairness", columns, ("key",), window=window,
        make=lambda pipeline, rows: pipeline.fairness.fairness(rows, by, window),
    )  # fmt: skip


def failures(options: PipelineOptions) -> None:
    """Group failed attempts by error, ignoring numbers, ids and quoted text.

    `taskqueue pipeline redrive FINGERPRINT` redrives the dead letters of one group.
    """
    columns = (
        "fingerprint", "key", "attempts", "tasks", "dead", "recovered", "last_seen", "message",
    )  # fmt: skip
    _table(options, "failures", columns, ("-attempts", "key", "fingerprint"))


def capacity(
    options: PipelineOptions, *, target_wait: TargetWait = 1.0, percentile: Percentile = 0.95
) -> None:
    """Recommend limits and a number of workers for a target waiting time, by replaying the recorded arrivals."""
    columns = (
        "key", "deliveries", "arrival_rate", "service_mean", "slots", "workers", "rate_limit", "utilisation",
        "expected_wait", "reason",
    )  # fmt: skip
    _table(options, "capacity", columns, ("key",), target_wait=target_wait, percentile=percentile)


def _table(
    options: PipelineOptions,
    name: str,
    columns: Sequence[str],
    order: Sequence[str],
    *,
    window: str | None = None,
    make: Callable[[Any, DataFrame], DataFrame] | None = None,
    **wishes: Any,
) -> None:
    """Build a table, write it to the folder for results, and print it.

    ``make`` is called with the package `taskqueue_spark.pipeline` and the transitions, and returns the table. Without
    ``make``, the builder of the report creates the table.
    """
    with snapshot_tables(options, **wishes, window=window or "1 minute") as (opened, build):
        from taskqueue_spark import pipeline  # noqa: PLC0415 - imports Spark, which is slow
        from taskqueue_spark.pipeline import tables  # noqa: PLC0415

        with opened.work.stages.stage(name) as stage:
            if make is None:
                frame = build.table(name)
            else:
                rows = opened.of_keys(make(pipeline, build.transitions))
                frame = tables.write(rows, opened.results, name)
            count = tables.rows(opened.results, name)
            stage.note = f"{count:,} row{'' if count == 1 else 's'}"
            shown = tables.first_rows(frame, *order)
    if options.as_json:
        out = None if options.out is None else str(options.out)
        print_json({"table": name, "out": out, "count": count, "rows": shown})
    else:
        print_table(shown, columns, of=count)

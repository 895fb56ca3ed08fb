"""``taskqueue pipeline snapshot|audit|history|latency|throughput|fairness|failures|capacity``: one table each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer
from rich.text import Text

from taskqueue_cli.output import FAILED, console, paragraphs, print_json
from taskqueue_core.errors import ConfigurationError
from taskqueue_spark.cli.options import PipelineOptions, options, with_options
from taskqueue_spark.cli.output import printed, rows_of
from taskqueue_spark.cli.session import needed
from taskqueue_spark.cli.snapshots import Snapshotted, store_options, taken

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from taskqueue_spark.report.build import ReportBuild


Window = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="Length of windows for values over time, for example '30 seconds' or '5 minutes'.",
        show_default=False,
    ),
]
Live = Annotated[
    bool | None,
    typer.Option(
        "--live/--no-live",
        help="Look up unfinished tasks in the store. Default: with --backend.",
        show_default=False,
    ),
]
Grace = Annotated[
    float,
    typer.Option(
        help="Report a task as lost if the store does not have it this many seconds after its last event."
    ),
]
TargetWait = Annotated[float, typer.Option(help="Target for the wait of a task, in seconds.")]
Percentile = Annotated[float, typer.Option(help="Share of tasks that must meet the target.")]


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    commands = {
        "snapshot": snapshot,
        "audit": audit,
        "history": history,
        "latency": latency,
        "throughput": throughput,
        "fairness": fairness,
        "failures": failures,
        "capacity": capacity,
    }
    for name, command in commands.items():
        app.command(name=name, help=paragraphs(command.__doc__))(with_options(options)(command))


def store_of(shot: Snapshotted, live: bool | None) -> dict[str, str] | None:  # noqa: FBT001 - as the option has it
    """Return options by which the store can be asked, if it is to be.

    It is not by itself where a part of the journal is looked at that ended before now.
    """
    at_hand = shot.source is not None and shot.source["backend"] == "redis"
    if live is None:
        live = at_hand and shot.options.until is None
    if not live:
        return None
    if not at_hand:
        raise ConfigurationError("--live: needs a journal that is read from Redis")
    return store_options()


@contextmanager
def snapshot_tables(
    asked: PipelineOptions, *, live: bool | None = False, **wishes: Any
) -> Iterator[tuple[Snapshotted, ReportBuild]]:
    """Take a snapshot to make tables of. Raises as `taken` does, and `InvalidInput` for wishes, before Spark starts."""
    with needed():
        from taskqueue_spark.report.build import ReportBuild, Wishes  # noqa: PLC0415 - Spark takes its time
    wished = Wishes(**wishes, whole=asked.since is None)
    with taken(asked, makes=True) as shot:
        wished = msgspec.structs.replace(wished, store=store_of(shot, live), behind=shot.behind)
        yield shot, ReportBuild(shot.transitions(), shot.results, wished, shot.of_keys)


def snapshot(asked: PipelineOptions) -> None:
    """Keep the journal as Parquet: DIR/transitions by date, and DIR/damaged what cannot be read of it.

    Further commands take it with --from DIR. Doing it again replaces it by the journal as it is then.
    """
    if asked.out is None or asked.saved is not None:
        raise ConfigurationError("snapshot: needs --out DIR, and a journal other than --from")
    if asked.keys:
        raise ConfigurationError(
            "snapshot: contains every queue; set --key for the commands that read it"
        )
    with taken(asked) as shot:
        if asked.as_json:
            print_json({"out": str(asked.out), "transitions": shot.rows, "damaged": shot.damaged})
        else:
            console.print(f"{shot.rows:,} transitions in [bold]{asked.out}[/]", highlight=False)
            if shot.damaged:
                console.print(
                    f"[yellow]{shot.damaged:,} entries could not be read: see DIR/damaged"
                )


def audit(asked: PipelineOptions, *, live: Live = None, grace: Grace = 60.0) -> None:
    """Was anything lost? Every published task completed, explicitly failed, or where it is now.

    Each life of a task has one verdict; the sums must balance. Exits with 1 if they do not, if a task is lost, or if
    one ended twice or the like. What a journal that was cut off cannot tell is unknown, never no loss.
    """
    with snapshot_tables(asked, live=live, grace=grace) as (shot, tables):
        from taskqueue_spark.report.content import build_content  # noqa: PLC0415 - Spark takes its time

        with shot.work.stages.stage("audit"):
            content = build_content(tables, shot.damaged)
        verdict = content.verdict()
        if asked.as_json:
            print_json(
                {
                    "ok": verdict.ok,
                    "verdict": verdict,
                    **msgspec.to_builtins(content, builtin_types=[]),
                }
            )
        else:
            style = (
                "bold green"
                if verdict.kind == "balanced"
                else "bold red"
                if not verdict.ok
                else "bold yellow"
            )
            console.print(Text(verdict.title, style))
            for sentence in verdict.sentences:
                console.print(f"  {sentence}", highlight=False)
            _zeros_away(content.conservation, content.total)
    if not verdict.ok:
        raise typer.Exit(FAILED)


def _zeros_away(rows: Sequence[dict[str, Any]], total: Mapping[str, Any]) -> None:
    always = ("key", "published", "completed", "lost", "balanced", "complete")
    if rows:
        names = [name for name in rows[0] if name in always or total.get(name)]
        printed(rows, names, of=total["queues"])


def history(asked: PipelineOptions) -> None:
    """Did every task live by the rules? R0 to R13 over each task's history, with a count for every rule.

    Exits with 1 if any was broken.
    """
    with snapshot_tables(asked) as (shot, tables):
        with shot.work.stages.stage("history"):
            counts = rows_of(tables.table("rules"))
            broken = rows_of(tables.table("violations"), "rule", "key", "run", "shard", "seq")
        total = sum(row["count"] for row in counts)
        counts.sort(key=lambda row: int(row["rule"].strip("R") or 0))
        if asked.as_json:
            print_json({"ok": not total, "count": total, "rules": counts, "violations": broken})
        else:
            printed(counts, ("rule", "count"))
            if broken:
                printed(broken, ("rule", "key", "task_id", "seq", "text"), of=total)
    if total:
        raise typer.Exit(FAILED)


def latency(
    asked: PipelineOptions,
    *,
    window: Window = None,
    classes: Annotated[
        bool, typer.Option("--classes", help="Split by priority and tenant.")
    ] = False,
) -> None:
    """Where does the time go? Waiting, running and from beginning to end: p50, p95, p99 and the most, in seconds."""
    split = ("priority", "tenant") if classes else ()
    kinds = ("queue_wait", "run", "end_to_end")
    names = ("tasks", *(f"{kind}_{name}" for kind in kinds for name in ("p50", "p95", "p99")))
    order = ("key", *split, *(("window_start",) if window else ()))

    def made(making: ReportBuild) -> DataFrame:
        from taskqueue_spark.pipeline import latency as module  # noqa: PLC0415 - Spark takes its time

        return module.latency(making.transitions, window, by=split)

    _table(asked, "latency", made, (*order, *names), order, **_windows(window))


def throughput(asked: PipelineOptions, *, window: Window = None) -> None:
    """How much happens? Counts of every event, and per second."""
    columns = (
        "key", *(("window_start",) if window else ()), "seconds", "published", "delivered", "acked", "retried",
        "redelivered", "lost", "dead_lettered", "acked_per_second",
    )  # fmt: skip

    def made(making: ReportBuild) -> DataFrame:
        from taskqueue_spark.pipeline import throughput as module  # noqa: PLC0415 - Spark takes its time

        return module.throughput(making.transitions, window)

    _table(asked, "throughput", made, columns, ("key", "window_start"), **_windows(window))


def fairness(
    asked: PipelineOptions,
    *,
    by: Annotated[
        Literal["tenant", "worker"], typer.Option(help="Column whose values compete.")
    ] = "tenant",
    window: Annotated[
        str, typer.Option(help="Length of the window in which they compete.")
    ] = "1 minute",
) -> None:
    """Does everybody get a share? Jain's index over tenants, or workers, where they competed: 1 is even."""
    columns = ("key", "windows", "jain", "jain_lowest", "members", "deliveries", "jain_total")

    def made(making: ReportBuild) -> DataFrame:
        from taskqueue_spark.pipeline import fairness as module  # noqa: PLC0415 - Spark takes its time

        return module.fairness(making.transitions, by, window)

    _table(asked, "fairness", made, columns, ("key",), window=window)


def failures(asked: PipelineOptions) -> None:
    """Which failures repeat? Errors that differ in what they quote alone are one.

    `taskqueue pipeline redrive FINGERPRINT` has the dead of one tried again.
    """
    columns = (
        "fingerprint",
        "key",
        "attempts",
        "tasks",
        "dead",
        "recovered",
        "last_seen",
        "message",
    )
    _table(asked, "failures", None, columns, ("-attempts", "key", "fingerprint"))


def capacity(
    asked: PipelineOptions, *, target_wait: TargetWait = 1.0, percentile: Percentile = 0.95
) -> None:
    """Which limits should there be? Slots, workers and rates for a target wait, by replaying what was recorded."""
    columns = (
        "key", "deliveries", "arrival_rate", "service_mean", "slots", "workers", "rate_limit", "utilisation",
        "expected_wait", "reason",
    )  # fmt: skip
    _table(
        asked, "capacity", None, columns, ("key",), target_wait=target_wait, percentile=percentile
    )


def _windows(window: str | None) -> dict[str, str]:
    return {} if window is None else {"window": window}


def _table(
    requested: PipelineOptions,
    name: str,
    make: Callable[[ReportBuild], DataFrame] | None,
    columns: Sequence[str],
    order: Sequence[str],
    **wishes: Any,
) -> None:
    """Make a table, write it where that is wanted, and show it."""
    with snapshot_tables(requested, **wishes) as (shot, made):
        from taskqueue_spark.pipeline import tables  # noqa: PLC0415 - Spark takes its time

        def retained(table: DataFrame) -> DataFrame:
            return tables.write(table, shot.results, name)

        with shot.work.stages.stage(name) as stage:
            frame = made.table(name) if make is None else retained(shot.of_keys(make(made)))
            count = tables.rows(shot.results, name)
            stage.note = f"{count:,} rows"
            rows = rows_of(frame, *order)
        if requested.as_json:
            out = None if requested.out is None else str(requested.out)
            print_json({"table": name, "out": out, "count": count, "rows": rows})
        else:
            printed(rows, columns, of=count)

"""``taskqueue pipeline stream``: the service that archives a journal and watches it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from taskqueue_cli.output import (
    FAILED,
    LogLevel,
    configure_logging,
    console,
    paragraphs,
    print_json,
)
from taskqueue_core.errors import ConfigurationError
from taskqueue_spark.cli.options import PipelineOptions, options, with_options
from taskqueue_spark.cli.session import needed, work
from taskqueue_spark.cli.snapshots import source_of


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="stream", help=paragraphs(stream.__doc__))(with_options(options)(stream))


def stream(
    asked: PipelineOptions,
    *,
    trigger: Annotated[float, typer.Option(min=0, help="Seconds between batches.")] = 10.0,
    once: Annotated[
        bool, typer.Option("--once", help="Process the current journal, then exit.")
    ] = False,
    max_events: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of transitions in a batch.")
    ] = 500_000,
    window: Annotated[
        int, typer.Option(min=1, help="Length of a metrics window, in seconds.")
    ] = 60,
    stuck_after: Annotated[
        float, typer.Option(min=0, help="Report a task as stuck after this many seconds in flight.")
    ] = 600.0,
    waiting_after: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Report a task that waits longer than this many seconds. Default: no limit.",
            show_default=False,
        ),
    ] = None,
    failure_share: Annotated[
        float,
        typer.Option(min=0, max=1, help="Report failures from this share of executions on."),
    ] = 0.1,
    failure_least: Annotated[
        int, typer.Option(min=1, help="Minimum number of executions in a window for such a report.")
    ] = 20,
    log_level: LogLevel = "info",
) -> None:
    """Archive the journal as it grows, keep metrics, and tell what is amiss; until Ctrl-C or SIGTERM.

    DIR/transitions is an archive for --from, DIR/metrics has windows, DIR/stream/alerts.jsonl each alert once: an
    imbalance or a gap, tasks that are stuck, failures that rise. The next run with the same --out goes on where this
    one ended, however that was: nothing is lost or doubled. Exits with 1 if tasks were lost or the books do not
    balance.
    """
    if asked.out is None or asked.saved is not None or asked.keys or asked.until is not None:
        raise ConfigurationError(
            "stream: needs --out DIR; allowed: --backend or --journal, --since, without --key and --until"
        )
    source = source_of(asked)
    with needed():
        from taskqueue_spark.service import StreamOptions, run  # noqa: PLC0415 - Spark takes its time
    options = StreamOptions(
        out=Path(asked.out).expanduser().absolute(),
        source=source,
        trigger=trigger,
        once=once,
        max_events=max_events,
        window=window,
        stuck_after=stuck_after,
        waiting_after=waiting_after,
        failure_share=failure_share,
        failure_least=failure_least,
    )
    configure_logging(log_level)
    with work(asked) as running:
        done = run(running.spark, options, say=running.stages.note)
    if asked.as_json:
        print_json(done)
    else:
        console.print(
            f"{done.transitions:,} transitions in the archive, {done.batches:,} batches this time"
        )
        if done.lost:
            console.print(
                f"{done.lost:,} tasks were lost when their store was emptied", style="bold red"
            )
        for alert in done.alerts:
            console.print(alert, style="bold red", markup=False)
    if not done.sound:
        raise typer.Exit(FAILED)

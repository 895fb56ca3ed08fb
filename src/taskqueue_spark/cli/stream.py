"""The command ``taskqueue pipeline stream``: a service that archives a journal and raises alerts."""

from __future__ import annotations

from typing import Annotated

import typer

from taskqueue_cli.output import FAILED, LogLevel, configure_logging, console, print_json
from taskqueue_core.errors import ConfigurationError
from taskqueue_spark.cli.options import PipelineOptions
from taskqueue_spark.cli.session import explain_missing_modules, work
from taskqueue_spark.cli.snapshots import source_of


def stream(
    options: PipelineOptions,
    *,
    trigger: Annotated[
        float, typer.Option(min=0, help="Seconds between the starts of batches.")
    ] = 10.0,
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
        typer.Option(
            min=0,
            max=1,
            help="Report rising failures only if at least this share of executions failed.",
        ),
    ] = 0.1,
    failure_least: Annotated[
        int,
        typer.Option(
            min=1, help="Report rising failures only in windows with at least this many executions."
        ),
    ] = 20,
    log_level: LogLevel = "info",
) -> None:
    """Archive the journal as it grows, store metrics, and raise alerts, until Ctrl-C or SIGTERM.

    DIR/transitions is an archive for --from, DIR/metrics has counts per time window, and DIR/stream/alerts.jsonl has
    all alerts: imbalances, gaps, emptied stores, stuck or waiting tasks, and rising failures. Another run with the
    same --out continues where the last one ended, even after a crash. No transition is lost or repeated. The exit code
    is 1 if tasks were lost or the counts do not balance.
    """
    if options.out is None or options.saved is not None or options.keys or options.end is not None:
        raise ConfigurationError(
            "stream: needs --out DIR, and does not accept --from, --key or --until"
        )
    source = source_of(options)
    with explain_missing_modules():
        from taskqueue_spark.service import StreamOptions  # noqa: PLC0415 - imports Spark, which is slow
        from taskqueue_spark.service.process import locked, run_locked  # noqa: PLC0415
    stream_options = StreamOptions(
        out=options.out.expanduser().absolute(),
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
    # Lock the folder first, because Spark takes seconds to start.
    with locked(stream_options), work(options) as running:
        summary = run_locked(running.spark, stream_options, say=running.stages.note)
    if options.as_json:
        print_json(summary)
    else:
        console.print(
            f"transitions in the archive: {summary.transitions:,}; batches in this run: {summary.batches:,}"
        )
        if summary.lost:
            text = f"tasks that were lost when their store was emptied: {summary.lost:,}"
            console.print(text, style="bold red")
        for alert in summary.alerts:
            console.print(alert, style="bold red", markup=False)
    if not summary.sound:
        raise typer.Exit(FAILED)

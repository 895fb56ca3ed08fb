"""The command ``taskqueue pipeline report``: one page with all results."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import webbrowser
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.text import Text

from taskqueue_cli.output import FAILED, console, print_json
from taskqueue_spark.cli.options import PipelineOptions
from taskqueue_spark.cli.output import print_outcome
from taskqueue_spark.cli.snapshots import OpenSnapshot
from taskqueue_spark.cli.tables import Live, Percentile, TargetWait, snapshot_tables
from taskqueue_spark.report.outcome import Outcome

_DEFAULT_FOLDER = Path("taskqueue-report")


def report(
    options: PipelineOptions,
    *,
    live: Live = None,
    target_wait: TargetWait = 1.0,
    percentile: Percentile = 0.95,
    show: Annotated[
        bool, typer.Option("--open", help="Open the page in a browser, if there is a display.")
    ] = False,
) -> None:
    """Create all tables, a self-contained page about them (DIR/report.html), and its data as JSON (DIR/report.json).

    The page shows lost tasks, broken rules, throughput, latency, repeated failures, fairness and recommended limits.
    DIR is the value of --out, by default ./taskqueue-report. The exit code is 1 if a check found a fault.
    """
    options = replace(options, out=options.out or _DEFAULT_FOLDER)
    with snapshot_tables(options, live=live, target_wait=target_wait, percentile=percentile) as (
        opened,
        build,
    ):
        from taskqueue_spark.pipeline.tables import replace_file  # noqa: PLC0415 - imports Spark, which is slow
        from taskqueue_spark.report import content  # noqa: PLC0415
        from taskqueue_spark.report.page import page  # noqa: PLC0415

        stages = opened.work.stages
        with stages.stage("find the time span") as stage:
            extent = content.extent(build.select(build.transitions))
            length = int(content.length_of(extent.seconds, 60, least=1))
            build.wishes = msgspec.structs.replace(build.wishes, window=f"{length} seconds")
            stage.note = f"{extent.seconds:,.1f} s, {extent.workers} worker{'' if extent.workers == 1 else 's'}"
        build.all(stages.stage)
        with stages.stage("report") as stage:
            fields = content.report_content(
                build,
                opened.damaged,
                _source_name(opened),
                _source_options(opened),
            )
            folder = opened.results.expanduser().absolute()
            html, data = folder / "report.html", folder / "report.json"
            text = page(fields).encode()
            replace_file(data, msgspec.json.format(msgspec.json.encode(fields), indent=1))
            replace_file(html, text)
            stage.note = f"{len(text) / 1024:,.0f} kB"
    outcome = msgspec.convert(fields["verdict"], Outcome)
    if options.as_json:
        files = {"html": str(html), "json": str(data)}
        print_json({"ok": outcome.ok, "verdict": outcome} | files)
    else:
        print_outcome(outcome)
        console.print(Text(str(html)), soft_wrap=True)
    display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if show and (display or sys.platform == "darwin"):
        with contextlib.suppress(webbrowser.Error):
            webbrowser.open(html.as_uri())
    if not outcome.ok:
        raise typer.Exit(FAILED)


def _source_name(opened: OpenSnapshot) -> str:
    if opened.source is None:
        return f"the folder {opened.path.name}"
    if opened.source["backend"] == "lines":
        return f"the journal file {Path(opened.source['path']).name}"
    return "Redis"


def _source_options(opened: OpenSnapshot) -> str:
    """Return the options with which other commands open the same snapshot."""
    near = os.path.relpath(opened.path.expanduser())
    return shlex.join(["--from", str(opened.path) if near.startswith("..") else near])

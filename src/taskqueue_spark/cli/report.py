"""``taskqueue pipeline report``: everything at once, on one page."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.text import Text

from taskqueue_cli.output import FAILED, console, paragraphs, print_json
from taskqueue_spark.cli.options import PipelineOptions, options, with_options
from taskqueue_spark.cli.snapshots import Snapshotted
from taskqueue_spark.cli.tables import Live, Percentile, TargetWait, snapshot_tables

_HERE = Path("taskqueue-report")


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="report", help=paragraphs(report.__doc__))(with_options(options)(report))


def report(
    asked: PipelineOptions,
    *,
    live: Live = None,
    target_wait: TargetWait = 1.0,
    percentile: Percentile = 0.95,
    show: Annotated[
        bool, typer.Option("--open", help="Open the page in a browser, if there is a display.")
    ] = False,
) -> None:
    """Make every table, and of them one page that needs nothing else: DIR/report.html, and DIR/report.json.

    Conservation and rules, how much came and went, where the time goes, which failures repeat, who got which share, and
    which limits there should be. DIR is --out, or taskqueue-report here. Exits with 1 if a check found something wrong.
    """
    asked = msgspec.structs.replace(asked, out=asked.out or _HERE)
    with snapshot_tables(asked, live=live, target_wait=target_wait, percentile=percentile) as (
        shot,
        tables,
    ):
        from taskqueue_spark.report import content  # noqa: PLC0415 - Spark takes its time
        from taskqueue_spark.report.page import page, written  # noqa: PLC0415

        stages = shot.work.stages
        with stages.stage("look it over") as stage:
            result = content.extent(tables.mine(tables.transitions))
            length = int(content.length_of(result.seconds, 60, least=1))
            tables.wishes = msgspec.structs.replace(tables.wishes, window=f"{length} seconds")
            stage.note = f"{result.seconds:,.1f} s, {result.workers} workers"
        tables.all(stages)
        with stages.stage("report") as stage:
            told_of = content.gathered(tables, shot.damaged, _source_name(shot), _where(shot))
            path = shot.results.expanduser().absolute()
            data = msgspec.json.format(msgspec.json.encode(told_of), indent=1)
            html = page(told_of).encode()
            written(path / "report.json", data)
            written(path / "report.html", html)
            stage.note = f"{len(html) / 1024:,.0f} kB"
    verdict = told_of["verdict"]
    ok = verdict["kind"] not in {"lost", "unbalanced", "violated"}
    where = path / "report.html"
    if asked.as_json:
        files = {"html": str(where), "json": str(path / "report.json")}
        print_json({"ok": ok, "verdict": verdict} | files)
    else:
        style = (
            "bold green"
            if verdict["kind"] == "balanced"
            else "bold red"
            if not ok
            else "bold yellow"
        )
        console.print(Text(verdict["title"], style))
        console.print(Text(str(where)), soft_wrap=True)
    if show and _screen():
        with contextlib.suppress(webbrowser.Error):
            webbrowser.open(where.as_uri())
    if not ok:
        raise typer.Exit(FAILED)


def _source_name(shot: Snapshotted) -> str:
    if shot.source is None:
        return f"kept in {shot.path.name}"
    if shot.source["backend"] == "lines":
        return f"lines of {Path(shot.source['path']).name}"
    return "Redis"


def _where(shot: Snapshotted) -> str:
    near = os.path.relpath(shot.path.expanduser())
    return shlex.join(["--from", str(shot.path) if near.startswith("..") else near])


def _screen() -> bool:
    return sys.platform == "darwin" or bool(
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )

"""Tables of a run: as text for the terminal, and as Markdown for the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

import catalog
import scaling
import tables
import targets
from meter import QUIET
from tables import shown

CONTENDED = " ~"
Table = tuple[str, list[str], list[list[str]]]
_RATES = ("publish", "bulk", "drain")
_CONTROLLED = ("floor-p100", "floor-again", "floor-task", "floor-lua", "floor-p1")
"""entries that publish single tasks with the same code"""


def plain(run: dict[str, Any]) -> str:
    """Return all tables as text of fixed width, and the errors of the run."""
    return text(every(run), notes(run))


def text(tables: Iterable[Table], said: Iterable[str]) -> str:
    """Return tables as text of fixed width, with their notes."""
    parts = []
    for title, head, rows in tables:
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        parts.append(title)
        parts += [
            "  ".join(
                cell.ljust(width) if not at else cell.rjust(width)
                for at, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in (head, *rows)
        ]
        parts.append("")
    return "\n".join([*parts, *said])


def markdown(run: dict[str, Any]) -> str:
    """Return all tables as Markdown, with their notes."""
    parts = [section(table, align="---:") for table in every(run)]
    return "\n".join([*parts, *(f"- {note}" for note in notes(run))]) + "\n"


def section(table: Table, *, align: str = "---") -> str:
    """Return a heading and a table as Markdown. ``align`` is the alignment of all columns except the first."""
    title, head, rows = table
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    lines.insert(1, "|---|" + f"{align}|" * (len(head) - 1))
    return "\n".join([f"### {title}", "", *lines, ""])


def every(run: dict[str, Any]) -> list[Table]:
    """Return the tables for which the run has figures, each as a title, a header and rows."""
    cells = {(cell["entry"], cell["figure"]): cell for cell in run["summary"]}
    names = [entry["name"] for entry in run["entries"] if entry["name"] not in run["absent"]]
    found = [
        ("Figures to reach", *_targets(run)),
        ("Throughput, tasks per second", *_throughput(run, names, cells)),
        ("Latency from publish to handler at 200 per second", *_latency(names, cells)),
        ("What a task costs", *_costs(names, cells)),
        ("Cost per task by keys, limits and backlog", *_growth(run)),
        ("Redis memory", *_memory(run)),
        ("Idle", *_idle(run)),
    ]
    return [table for table in found if table[2]]


def notes(run: dict[str, Any]) -> list[str]:
    """Return the notes on the tables."""
    turns = run["turns"]
    said = [f"seed {run['seed']}; {run['rounds']} rounds; {run['seconds']:.0f} s in all"]
    control = [
        tables.FIGURES[0].value(turn["windows"]["single"])
        for turn in turns
        if turn["entry"] in _CONTROLLED and turn["windows"]
    ]
    if rates := [rate for rate in control if rate]:
        said.append(
            "A/A control: the floors publish one by one with the very same code, at "
            f"{shown(median(rates))}/s (median), {shown(min(rates))} to {shown(max(rates))}: "
            "smaller differences are noise"
        )
    windows = [w for turn in turns for w in turn["windows"].values() if "seconds" in w]
    loud = sum(window["foreign"] > QUIET for window in windows)
    said.append(
        f"{loud} of {len(windows)} windows were contended (others used over {QUIET} cores); "
        f"{CONTENDED.strip()} marks a median that had to use them"
    )
    said += [f"INVALID: {turn['entry']}: {turn['invalid']}" for turn in turns if turn["invalid"]]
    said += [f"INVALID: {name}: {why}" for name, why in run["scaling"].get("failed", {}).items()]
    said += [f"left out: {name}: no environment" for name in run["absent"]]
    if not run["pinned"]:
        said.append("not pinned: this machine cannot keep Redis and clients on cores of their own")
    return said


def _targets(run: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    found = targets.Found(run)
    rows = []
    for target in targets.TARGETS:
        found.contended = False
        reached = target.reached(found)
        if reached is not None:
            rows.append(
                [
                    target.figure,
                    target.measure,
                    f"{target.sign} {target.bound:g}",
                    shown(target.value(found)) + (CONTENDED if found.contended else ""),
                    "reached" if reached else "NOT reached",
                ]
            )
    return ["figure", "measure", "reach", "found", ""], rows


def _throughput(
    run: dict[str, Any], names: Iterable[str], cells: dict[tuple[str, str], dict[str, Any]]
) -> tuple[list[str], list[list[str]]]:
    invalid = {turn["entry"] for turn in run["turns"] if turn["invalid"]}
    about = {entry["name"]: entry for entry in run["entries"]}
    rows = []
    for name in names:
        row = [name + (" †" if name in invalid else ""), about[name]["promise"]]
        for figure in _RATES:
            cell = cells.get((name, figure))
            row += [_value(cell), _ratio(cell, "to_floor"), _ratio(cell, "to_best_peer")]
        drain = cells.get((name, "drain"))
        row += [f"{shown(drain['low'])} to {shown(drain['high'])}" if drain else "INVALID"]
        rows.append([*row, str(drain["windows"]) if drain else "0"])
    head = ["", "promise", "one by one", "x floor", "x peer", "bulk", "x floor", "x peer"]
    return [*head, "drain", "x floor", "x peer", "drain, range", "windows"], rows


def _latency(
    names: Iterable[str], cells: dict[tuple[str, str], dict[str, Any]]
) -> tuple[list[str], list[list[str]]]:
    rows = []
    for name in names:
        if (p50 := cells.get((name, "p50"))) and (p99 := cells.get((name, "p99"))):
            ratios = [_ratio(p50, "to_floor"), _ratio(p50, "to_best_peer")]
            span = f"{shown(p99['low'])} to {shown(p99['high'])}"
            rows.append([name, _value(p50), *ratios, _value(p99), span])
    return ["", "p50 ms", "x floor", "x peer", "p99 ms", "p99, range"], rows


def _costs(
    names: Iterable[str], cells: dict[tuple[str, str], dict[str, Any]]
) -> tuple[list[str], list[list[str]]]:
    figures = [one for one in tables.FIGURES if one.name not in (*_RATES, "p50", "p99")]
    rows = [
        [name, *(_value(cells.get((name, figure.name))) for figure in figures)]
        for name in names
        if (name, "drain") in cells
    ]
    return ["", *(f"{figure.name} {figure.unit}" for figure in figures)], rows


def _growth(run: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for what in ("keys", "limits", "backlog"):
        for entry, shapes in run["scaling"].get(what, {}).items():
            base = None
            for name, windows in shapes.items():
                counted, contended = tables.quiet(windows)
                costs = [1e6 * window["seconds"] / window["tasks"] for window in counted]
                trips = median(window["reads"] for window in counted)
                base = base or median(costs)
                rows.append(
                    [
                        f"{entry}: {name}",
                        shown(median(costs)) + (CONTENDED if contended else ""),
                        shown(median(costs) / base),
                        f"{shown(min(costs))} to {shown(max(costs))}",
                        str(len(costs)),
                        shown(trips),
                    ]
                )
    head = ["", "µs per task", "x first", "range", "windows", "round trips, publishing included"]
    return head, rows


def _memory(run: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for entry, found in run["scaling"].get("memory", {}).items():
        mega = [found[name] / 1e6 for name in ("before", "queued", "drained", "forgotten")]
        per = (mega[1] - mega[0]) * 100_000 / found["tasks"]
        rows.append([entry, f"{found['tasks']:,}", *map(shown, mega), shown(per)])
    head = ["", "tasks", "MB before", "queued", "drained"]
    return [*head, f"{scaling.WINDOW:g} s dedupe_window passed", "MB per 100k queued"], rows


def _idle(run: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            entry,
            str(found["subscriptions"]),
            str(found["connections"]),
            shown(100 * found["client_cpu"]),
            shown(100 * found["redis_cpu"]),
            shown(found["commands"]),
        ]
        for entry, found in run["scaling"].get("idle", {}).items()
    ]
    head = ["", "subscriptions", "connections", "client CPU %", "Redis CPU %", "commands/s"]
    return head, rows


def _value(cell: dict[str, Any] | None) -> str:
    return shown(cell["value"]) + (CONTENDED if cell["contended"] else "") if cell else "-"


def _ratio(cell: dict[str, Any] | None, which: str) -> str:
    return shown(cell[which]) if cell else "-"


def promises(entries: Sequence[catalog.Entry] = catalog.ALL) -> Table:
    """Return a table of the entries' delivery guarantees in the measured configuration, from their documentation."""
    rows = [
        [one.name, one.promise, one.acknowledges, one.recovers, one.settings] for one in entries
    ]
    head = ["", "promise", "acknowledgement", "recovery after a crash", "settings"]
    return "What each promises as it is measured", head, rows

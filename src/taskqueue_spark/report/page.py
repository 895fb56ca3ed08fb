"""The HTML page of a report: one self-contained file without scripts, for light and dark screens of any size."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from taskqueue_spark.report import numbers
from taskqueue_spark.report.plots import Series, bars, over_time, ranges

_RULES = {
    "R0": "An id is published again only after its task has ended and its dedupe_window has passed",
    "R1": "No task is lost, and none appears without being published",
    "R2": "Only delivered tasks are settled",
    "R3": "No task is delivered after its end",
    "R4": "Every task ends once",
    "R5": "A stale receipt changes nothing",
    "R6": "Only a retry raises the attempt number, and only a loss raises the loss count",
    "R7": "First deliveries are in order",
    "R8": "Tasks of one ordering key run one at a time, in order",
    "R9": "No task is delivered before its time, or while it waits for other tasks",
    "R10": "Never more tasks in flight than allowed",
    "R11": "Never more deliveries than the rate limit allows",
    "R12": "No task is delivered while its queue is paused",
    "R13": "No task is delivered after its deadline",
}
_VERDICTS = (
    ("completed", 2), ("waiting", 1), ("scheduled", 6), ("blocked", 11), ("in_flight", 5), ("dead_lettered", 4),
    ("expired", 3), ("cancelled", 7), ("discarded", 8), ("unknown", 9), ("lost", 10),
)  # fmt: skip
"""verdicts, and the numbers of their colours in the style sheet"""
_HALF_A_DAY = 43_200
_ALWAYS = ("published", "completed")
_LINES = 5
"""maximum number of queues shown in one plot"""
_SPREAD = ("p50", "p95", "p99")


def page(fields: Mapping[str, Any]) -> str:
    """Return the HTML page for the result of `content.report_content`. All texts in it are escaped."""
    return _template().render(
        report=fields,
        rules=[row | {"what": _RULES.get(row["rule"], "")} for row in fields["rules"]],
        shares=_shares(fields["account"]["total"]),
        tiles=list(_tiles(fields)),
        flow=_flow(fields["flow"]),
        days=fields["extent"]["seconds"] >= _HALF_A_DAY,
        spread=_spreads(fields),
        trends=_trends(fields),
        workers=_workers(fields["concurrency"]),
        failing=_failing(fields["failures"]),
        redrives=[_redrive(row, fields["where"]) for row in fields["failures"]],
        fairness=_fairness(fields["fairness"]),
        advised=[_advised(row) for row in fields["capacity"]],
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("taskqueue_spark.report", "parts"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in ("brief", "clock", "count", "percent", "rate", "seconds"):
        environment.filters[name] = getattr(numbers, name)
    environment.filters["words"] = lambda text: str(text).replace("_", " ")
    return environment.get_template("page.html")


def _tiles(fields: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the headline figures, each as a value, a name and a remark."""
    total, figures = fields["account"]["total"], fields["figures"]
    seconds, workers = fields["extent"]["seconds"], fields["extent"]["workers"]
    of = "of the slowest queue" if total["queues"] > 1 else ""
    done, failed, executions = total["completed"], figures["failed"], figures["executions"]
    share = f"{numbers.percent(failed / executions)} of executions" if executions else ""
    return [
        (numbers.count(total["published"]), "published", ""),
        (numbers.count(done), "completed", numbers.rate(done / seconds) if seconds else ""),
        (numbers.seconds(figures["wait_p95"]), "wait, p95", of),
        (numbers.seconds(figures["run_p95"]), "run, p95", of),
        (numbers.count(failed), "attempts failed", share),
        (numbers.count(total["dead_lettered"]), "dead letters", ""),
        (numbers.count(figures["again"]), "redelivered", "lost or released by a worker"),
        (
            numbers.count(figures["peak"]),
            "running at once, at most",
            f"{workers:,} worker{'' if workers == 1 else 's'}",
        ),
    ]


def _shares(total: Mapping[str, Any]) -> list[tuple[str, int, float, int]]:
    """Return each verdict with its count, its share in percent and the number of its colour."""
    totals = [(name, total[name], colour) for name, colour in _VERDICTS]
    whole = sum(total for _, total, _ in totals) or 1
    return [(name, total, 100 * total / whole, colour) for name, total, colour in totals if total]


def _flow(flow: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the plots of all queues together, and of each of the busiest queues if there are several."""
    if flow["start"] is None:
        return []
    several = flow["keys"] if len(flow["keys"]) > 1 else []
    queues = [("", flow["all"]), *((item["key"], item) for item in several)]
    return [_of_queue(name, series, flow) for name, series in queues]


def _of_queue(key: str, series: Mapping[str, Any], flow: Mapping[str, Any]) -> dict[str, Any]:
    step, start = flow["seconds"], flow["start"]
    of = f" of {key}" if key else ""
    names = [("published", 1), ("completed", 2), ("failed", 4), ("redelivered", 3)]
    shown = [(name, colour) for name, colour in names if any(series[name]) or name in _ALWAYS]
    lines = [
        Series(name, [value / step for value in series[name]], colour) for name, colour in shown
    ]
    backlog = Series("backlog", series["backlog"], 5, area=True)
    total = ", ".join(f"{sum(series[name]):,} {name}" for name, _ in shown)
    return {
        "key": key,
        "names": shown,
        "rates": over_time(
            f"Tasks per second{of}", f"{total}. Number of windows: {len(series['backlog'])}.", lines,
            start=start, step=step, unit=_per_second,
        ),
        "backlog": over_time(
            f"Backlog{of}", f"Tasks that have not ended, at most {max(series['backlog'], default=0):,}.", [backlog],
            start=start, step=step,
        ),
        "rows": [
            (start + timedelta(seconds=step * at), [series[name][at] for name, _ in shown], series["backlog"][at])
            for at in range(flow["windows"])
        ],
        "fine": step < 1,
    }  # fmt: skip


def _per_second(number: float) -> str:
    return f"{numbers.short(round(number, 3))}/s"


def _spreads(fields: Mapping[str, Any]) -> list[tuple[str, Markup]]:
    """Return a plot of waiting times and a plot of running times, with the percentiles of each queue."""
    plots = []
    for column, title, colour in (("queue_wait", "Waiting", 1), ("run", "Running", 2)):
        rows = [
            (
                row["key"],
                [row[f"{column}_{name}"] for name in _SPREAD],
                ", ".join(f"{name} {numbers.seconds(row[f'{column}_{name}'])}" for name in _SPREAD),
            )
            for row in fields["latency"][:12]
            if row[f"{column}_p50"] is not None
        ]
        if rows:
            plot = ranges(f"{title}, per queue", rows, unit=numbers.brief, colour=colour)
            plots.append((title, plot))
    return plots


def _trends(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return plots of waiting and running times: three percentiles for one queue, or only p95 for several queues."""
    by_key: dict[str, list[Mapping[str, Any]]] = {}
    for row in fields["latency_over_time"]:
        by_key.setdefault(row["key"], []).append(row)
    if not by_key:
        return []
    moments = [row["window_start"] for rows in by_key.values() for row in rows]
    start, step = min(moments), float(fields["window"].split()[0])
    number = int((max(moments) - start).total_seconds() / step) + 1
    if number < 3 or number > 2000:  # noqa: PLR2004 - too few points for a line, or too many for a page
        return []
    matches = []
    for column, title in (("queue_wait", "Waiting"), ("run", "Running")):
        if len(by_key) == 1:
            (rows,) = by_key.values()
            lines = [
                Series(name, _placed(rows, f"{column}_{name}", start, step, number), colour)
                for name, colour in zip(_SPREAD, (1, 3, 4), strict=True)
            ]
        else:
            lines = [
                Series(key, _placed(rows, f"{column}_p95", start, step, number), colour)
                for colour, (key, rows) in enumerate(list(by_key.items())[:_LINES], start=1)
            ]
        what = "p50, p95 and p99" if len(by_key) == 1 else "p95 per queue"
        plot = over_time(
            f"{title} over time", f"{what}, per {fields['window']}.", lines,
            start=start, step=step, unit=numbers.brief, half=True,
        )  # fmt: skip
        matches.append({"title": f"{title}, {what}", "lines": lines, "plot": plot})
    return matches


def _placed(
    rows: Sequence[Mapping[str, Any]], column: str, start: datetime, step: float, number: int
) -> list[float | None]:
    values: list[float | None] = [None] * number
    for row in rows:
        values[int((row["window_start"] - start).total_seconds() / step)] = row[column]
    return values


def _workers(rows: Sequence[Mapping[str, Any]]) -> Markup | None:
    """Return a plot with a bar per worker and queue: how many tasks of the queue the worker ran at once on average."""
    matches = [row for row in rows if row["worker"] is not None and row["mean"] is not None]
    matches.sort(key=lambda row: -row["executions"])
    if not matches:
        return None
    shown = [
        (
            f"{row['worker']} · {row['key']}",
            row["mean"],
            f"{row['mean']:.1f} at once, at most {row['peak']:,}, {row['executions']:,} in total",
        )
        for row in matches[:12]
    ]
    return bars("Concurrent tasks per worker", shown, colour=6)


def _failing(rows: Sequence[Mapping[str, Any]]) -> Markup | None:
    if not rows:
        return None
    shown = [(row["message"], row["attempts"], f"{row['attempts']:,}") for row in rows[:10]]
    return bars("Failed attempts by failure", shown, colour=4)


def _redrive(row: Mapping[str, Any], where: str) -> str:
    names = ["taskqueue", "pipeline", "redrive", row["fingerprint"], "--key", row["key"]]
    return f"{shlex.join(names)} {where}".strip()


def _advised(row: Mapping[str, Any]) -> str:
    names = ["taskqueue", "queue", "set", row["key"], "--max-inflight", str(row["max_inflight"])]
    if row["max_tokens"]:
        names += ["--rate", f"{row['max_tokens']}/{row['interval']}s"]
    return shlex.join(names)


def _fairness(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the fairness of each queue that has at least two members (tenants or workers), with a plot."""
    matches = []
    for row in rows:
        if row["members"] < 2:  # noqa: PLR2004 - fairness compares at least two members
            continue
        contended = bool(row["windows"])
        shares = row["shares"] if contended else row["shares_total"]
        shown = [
            (
                share["member"] or f"(no {row['by']})",
                share["share"] or 0,
                f"{numbers.percent(share['share'])}, {share['deliveries']:,}",
            )
            for share in shares[:12]
        ]  # fmt: skip
        title = f"Share of deliveries by {row['by']}, {row['key']}"
        plot = bars(title, shown, colour=1)
        matches.append(dict(row) | {"contended": contended, "plot": plot})
    return matches

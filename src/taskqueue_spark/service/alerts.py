"""Alerts: conditions that the state of the service shows, and the file that records their beginnings and ends."""

from __future__ import annotations

import datetime as dt
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow.compute as pc
import pyarrow.dataset as ds

from taskqueue_spark.service.options import StreamOptions
from taskqueue_spark.service.state import FailureTrend, QueueCounts, ServiceState, WindowCounts
from taskqueue_spark.service.windows import failed

_RISES = 100
"""maximum number of ended episodes of rising failures that the state keeps"""


def check_windows(state: ServiceState, options: StreamOptions, as_of: float) -> None:
    """Check finished windows that were not checked before, in order, and record those in which failures rise.

    ``as_of``: the time (Unix seconds) up to which all transitions are known.
    """
    last = int(as_of // options.window - 1) * options.window
    open_ones = {rise.key: rise for rise in state.rises if not rise.over}
    for key, windows in sorted(state.windows.items()):
        # Also check the window that follows a window with events: it may be empty, which ends an episode.
        due = {start for window in windows for start in (window, window + options.window)}
        for start in sorted(start for start in due if state.checked < start <= last):
            trend = _rise(key, windows, start, options)
            if trend is None:
                if key in open_ones:
                    open_ones.pop(key).over = True
            elif key not in open_ones:
                open_ones[key] = trend
                state.rises.append(trend)
    state.checked = max(state.checked, last)
    state.rises.sort(key=lambda rise: rise.window)
    state.rises = [
        rise for index, rise in enumerate(reversed(state.rises)) if index < _RISES or not rise.over
    ][::-1]


def _rise(
    key: str, windows: dict[int, WindowCounts], start: int, options: StreamOptions
) -> FailureTrend | None:
    """Return an episode if failures rise in a window, as the limits in ``options`` define it; ``None`` otherwise."""
    bad, all_of_them = failed(windows.get(start, WindowCounts()))
    share = bad / all_of_them if all_of_them else 0.0
    if all_of_them < options.failure_least or share < options.failure_share:
        return None
    others = range(start - options.keep * options.window, start, options.window)
    before = [failed(windows[other]) for other in others if other in windows]
    executions = sum(number for _, number in before)
    usual = sum(number for number, _ in before) / executions if executions else 0.0
    if share <= options.failure_growth * usual:
        return None
    return FailureTrend(key=key, window=start, share=share, usual=usual, executions=all_of_them)


_SAMPLES = 10
_POSITIONS = {
    "missing": "{gap.run}/{gap.shard}/{gap.first}",
    "reset": "{gap.at:.6f}",
    "back": "{gap.run}/{gap.shard}/{gap.last}",
}
_TEXTS = {
    "missing": "transitions missing from a journal: {gap.number}",
    "reset": "a journal's numbers started again; live tasks that were lost: {gap.number}",
    "back": "a journal was rolled back; numbers that were used again: {gap.number}",
}
_log = logging.getLogger("taskqueue.pipeline")


class Condition(NamedTuple):
    """A condition that an operator should know about. ``kind`` and ``of`` together identify it."""

    kind: str
    """``imbalance``, ``missing``, ``reset``, ``stuck``, ``waiting`` or ``failing``"""
    of: str
    """the key of a queue; for ``missing`` and ``reset``, the run, shard and number of a gap, or its Unix time"""
    text: str
    details: Mapping[str, Any]
    passing: bool = False
    """whether the condition is a one-off event, which has no end"""
    episode: int = 0
    """start of the episode's first window (Unix seconds), for ``failing``; 0 for the other kinds"""
    over: bool = False
    """whether the episode has ended"""


def conditions(state: ServiceState, options: StreamOptions, as_of: float) -> list[Condition]:
    """Return the current conditions. ``as_of``: the time (Unix seconds) up to which all transitions are known."""
    matches = [
        Condition(
            "missing" if gap.kind == "missing" else "reset",
            _POSITIONS[gap.kind].format(gap=gap),
            _TEXTS[gap.kind].format(gap=gap),
            {name: getattr(gap, name) for name in ("shard", "run", "first", "last", "number")},
            passing=True,
        )
        for gap in state.gaps
    ]
    for key, books in sorted(state.books.items()):
        matches += _imbalance(key, books, state.differing.get(key))
    check_windows(state, options, as_of)
    matches += [
        Condition(
            "failing",
            rise.key,
            f"failed executions: {rise.share:.0%} of {rise.executions}, compared with {rise.usual:.0%} before",
            {name: getattr(rise, name) for name in ("share", "usual", "executions")}
            | {"window_start": rise.window},
            episode=rise.window,
            over=rise.over,
        )
        for rise in state.rises
    ]
    if state.open:
        opened = options.folder / "open" / state.open
        matches += stuck(opened, "in_flight", options.stuck_after, as_of)
        if options.waiting_after is not None:
            matches += stuck(opened, "waiting", options.waiting_after, as_of)
    return matches


def stuck(opened: Path, state: str, seconds: float, as_of: float) -> list[Condition]:
    """Return a condition for each queue with tasks that have been in ``state`` for more than ``seconds``."""
    limit = dt.datetime.fromtimestamp(as_of - seconds, dt.UTC)
    old = ds.dataset(opened, format="parquet").to_table(
        columns=["key", "task_id", "since", "worker"],
        filter=(ds.field("state") == state)
        & ds.field("here")
        & (ds.field("since") < pc.scalar(limit)),
    )
    matches = []
    for key in sorted(set(old["key"].to_pylist())):
        of_key = old.filter(pc.equal(old["key"], key)).sort_by("since")
        rows = of_key.slice(0, _SAMPLES).to_pylist()
        age = as_of - rows[0]["since"].timestamp()
        is_are = "task has been" if len(of_key) == 1 else "tasks have been"
        how = state.replace("_", " ")
        matches.append(
            Condition(
                "stuck" if state == "in_flight" else "waiting",
                key,
                f"{len(of_key)} {is_are} {how} for more than {seconds:g} s, the oldest for {age:.0f} s",
                {
                    "tasks": len(of_key),
                    "oldest": age,
                    "samples": [row["task_id"] for row in rows],
                    "workers": sorted({row["worker"] for row in rows if row["worker"]}),
                },
            )
        )
    return matches


def _imbalance(key: str, books: QueueCounts, differing: str | None) -> list[Condition]:
    if books.balanced is not False and differing is None:
        return []
    parts = []
    if books.balanced is False:
        if books.adopted:
            parts.append(f"tasks never published, or ended twice: {books.adopted}")
        if books.doubled:
            parts.append(f"tasks published while they existed: {books.doubled}")
        if not parts:
            parts.append(f"tasks unaccounted for: {abs(books.imbalance)}")
    if differing is not None:
        parts.append(differing)
    names = ("published", "ended", "live", "adopted", "doubled")
    details = {name: getattr(books, name) for name in names} | {"gone": books.expired}
    return [Condition("imbalance", key, "the counts do not balance: " + "; ".join(parts), details)]


class Alerts:
    """The recorder of alerts: it writes a line of JSON and a log message when an episode starts or ends.

    A one-off event gets one line. The file is the only state of this class, so a new process repeats no alert. An
    incomplete last line is removed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.current: dict[tuple[str, str], str] = {}
        """texts of the current episodes, by `Condition.kind` and `Condition.of`"""
        self.reported: list[str] = []
        """texts of the one-off events (conditions without an end) that this process has reported"""
        self._passed: set[tuple[str, str]] = set()
        self._episodes: dict[tuple[str, str], int] = {}
        whole = b""
        if path.exists():
            stored = path.read_bytes()
            whole = stored[: stored.rfind(b"\n") + 1]
            if whole != stored:
                os.truncate(path, len(whole))
        for line in whole.splitlines():
            record = msgspec.json.decode(line, type=dict[str, Any])
            position = (record["kind"], record["of"])
            if record["phase"] == "start":
                self.current[position] = record["text"]
                self._episodes[position] = record.get("episode", 0)
            elif record["phase"] == "end":
                self.current.pop(position, None)
            else:
                self._passed.add(position)

    def report(self, matches: Iterable[Condition], now: float) -> int:
        """Record new and ended episodes; return the number of lines that were written."""
        lines: list[dict[str, Any]] = []
        lasting = set()
        for condition in matches:
            position = (condition.kind, condition.of)
            if condition.passing:
                if position not in self._passed:
                    self._passed.add(position)
                    self.reported.append(f"{condition.kind} ({condition.of}): {condition.text}")
                    lines.append(_line("once", condition, now))
                continue
            value = self._episodes.get(position, 0)
            if condition.episode and (
                condition.episode < value
                or (condition.episode == value and position not in self.current)
            ):
                # This episode was reported before, and has ended.
                continue
            if position in self.current and condition.episode > value:
                lines.append(self._end(position, now))
            if position not in self.current:
                lines.append(_line("start", condition, now))
                self._episodes[position] = condition.episode
            self.current[position] = condition.text
            if not condition.over:
                lasting.add(position)
            else:
                lines.append(self._end(position, now))
        lines += [self._end(position, now) for position in sorted(set(self.current) - lasting)]
        if lines:
            with self._path.open("ab") as file:
                file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
                file.flush()
                os.fsync(file.fileno())
        for line in lines:
            level = logging.INFO if line["phase"] == "end" else logging.WARNING
            _log.log(level, "%s %s (%s): %s", line["phase"], line["kind"], line["of"], line["text"])
        return len(lines)

    def _end(self, position: tuple[str, str], now: float) -> dict[str, Any]:
        return _line("end", Condition(*position, self.current.pop(position), {}), now)


def _line(phase: str, condition: Condition, now: float) -> dict[str, Any]:
    moment = dt.datetime.fromtimestamp(now, dt.UTC).isoformat()
    episode = {"episode": condition.episode} if condition.episode else {}
    return {
        "phase": phase, "kind": condition.kind, "of": condition.of, "at": moment, "text": condition.text,
        **episode, **condition.details,
    }  # fmt: skip

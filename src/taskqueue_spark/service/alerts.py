"""When somebody should look: conditions over what is known, and the file that tells each episode once."""

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
from taskqueue_spark.service.state import Books, Rise, State, Window
from taskqueue_spark.service.windows import failed

__all__ = [
    "Alerts",
    "Condition",
    "conditions",
    "judge",
    "stuck",
]

_RISES = 100
"""that are remembered, beside those that are not over"""


def judge(state: State, options: StreamOptions, as_of: float) -> None:
    """Look at the windows that are over and were not looked at, in their order, and note where failures rise.

    ``as_of``: the time (Unix seconds) up to which everything that happened is known.
    """
    last = int(as_of // options.window - 1) * options.window
    open_ones = {rise.key: rise for rise in state.rises if not rise.over}
    for key, windows in sorted(state.windows.items()):
        # The window behind one in which something happened may have nothing, which ends an episode.
        due = {start for one in windows for start in (one, one + options.window)}
        for start in sorted(start for start in due if state.judged < start <= last):
            found = _rise(key, windows, start, options)
            if found is None:
                if key in open_ones:
                    open_ones.pop(key).over = True
            elif key not in open_ones:
                open_ones[key] = found
                state.rises.append(found)
    state.judged = max(state.judged, last)
    state.rises.sort(key=lambda rise: rise.window)
    state.rises = [
        rise for place, rise in enumerate(reversed(state.rises)) if place < _RISES or not rise.over
    ][::-1]


def _rise(key: str, windows: dict[int, Window], start: int, options: StreamOptions) -> Rise | None:
    """Compare a window with those before it."""
    bad, all_of_them = failed(windows.get(start, Window()))
    share = bad / all_of_them if all_of_them else 0.0
    if all_of_them < options.failure_least or share < options.failure_share:
        return None
    others = range(start - options.keep * options.window, start, options.window)
    before = [failed(windows[other]) for other in others if other in windows]
    executions = sum(number for _, number in before)
    usual = sum(number for number, _ in before) / executions if executions else 0.0
    if share <= options.failure_growth * usual:
        return None
    return Rise(key=key, window=start, share=share, usual=usual, executions=all_of_them)


_SAMPLES = 10
_PLACES = {
    "missing": "{gap.run}/{gap.shard}/{gap.first}",
    "reset": "{gap.at:.6f}",
    "back": "{gap.run}/{gap.shard}/{gap.last}",
}
_TEXTS = {
    "missing": "{gap.number} transitions are missing in a journal",
    "reset": "a journal began anew; {gap.number} tasks that lived before are gone",
    "back": "a journal went back; {gap.number} numbers were given a second time",
}
_log = logging.getLogger("taskqueue.pipeline")


class Condition(NamedTuple):
    """Something that somebody should know. ``kind`` and ``of`` tell its episodes from others'."""

    kind: str
    """imbalance, missing, reset, stuck, waiting or failing"""
    of: str
    """a queue, or a part of a journal"""
    text: str
    details: Mapping[str, Any]
    passing: bool = False
    """it has happened, and has no end of its own"""
    episode: int = 0
    """where more is known of it than that it is so now: its number, higher than those before"""
    over: bool = False
    """that episode is"""


def conditions(state: State, options: StreamOptions, as_of: float) -> list[Condition]:
    """Return what is amiss. ``as_of``: the time (Unix seconds) up to which everything that happened is known."""
    found = [
        Condition(
            "missing" if gap.kind == "missing" else "reset",
            _PLACES[gap.kind].format(gap=gap),
            _TEXTS[gap.kind].format(gap=gap),
            {
                "shard": gap.shard,
                "run": gap.run,
                "first": gap.first,
                "last": gap.last,
                "number": gap.number,
            },
            passing=True,
        )
        for gap in state.gaps
    ]
    for key, books in sorted(state.books.items()):
        found += _imbalance(key, books, state.differing.get(key))
    judge(state, options, as_of)
    found += [
        Condition(
            "failing",
            rise.key,
            f"{rise.share:.0%} of {rise.executions} executions failed, before that {rise.usual:.0%}",
            {
                "share": rise.share,
                "usual": rise.usual,
                "executions": rise.executions,
                "window_start": rise.window,
            },
            episode=rise.window,
            over=rise.over,
        )
        for rise in state.rises
    ]
    if state.open:
        opened = options.folder / "open" / state.open
        found += stuck(opened, "in_flight", options.stuck_after, as_of)
        if options.waiting_after is not None:
            found += stuck(opened, "waiting", options.waiting_after, as_of)
    return found


def stuck(opened: Path, state: str, seconds: float, as_of: float) -> list[Condition]:
    """Find the tasks that have been in a state for too long, per queue, with the oldest ones as samples."""
    limit = dt.datetime.fromtimestamp(as_of - seconds, dt.UTC)
    old = ds.dataset(opened, format="parquet").to_table(
        columns=["key", "task_id", "since", "worker"],
        filter=(ds.field("state") == state)
        & ds.field("here")
        & (ds.field("since") < pc.scalar(limit)),
    )
    found = []
    for key in sorted(set(old["key"].to_pylist())):
        of_key = old.filter(pc.equal(old["key"], key)).sort_by("since")
        rows = of_key.slice(0, _SAMPLES).to_pylist()
        age = as_of - rows[0]["since"].timestamp()
        kind = "stuck" if state == "in_flight" else "waiting"
        is_are = "task is" if len(of_key) == 1 else "tasks are"
        how = "in flight" if state == "in_flight" else "waiting"
        found.append(
            Condition(
                kind,
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
    return found


def _imbalance(key: str, books: Books, differing: str | None) -> list[Condition]:
    if books.balanced is not False and differing is None:
        return []
    parts = []
    if books.balanced is False:
        if books.adopted:
            parts.append(f"{books.adopted} came from nowhere, or ended twice")
        if books.doubled:
            parts.append(f"{books.doubled} were published while they were there")
        if not parts:
            parts.append(f"{abs(books.imbalance)} are not accounted for")
    if differing is not None:
        parts.append(differing)
    details = {
        "published": books.published,
        "ended": books.ended,
        "live": books.live,
        "gone": books.gone,
        "adopted": books.adopted,
        "doubled": books.doubled,
    }
    return [Condition("imbalance", key, "the books do not balance: " + "; ".join(parts), details)]


class Alerts:
    """Tells conditions once per episode: a line of JSON at its start and one at its end, and the same in the log.

    The file is all that is remembered: whoever goes on with it tells nothing twice. A torn last line is taken off.
    """

    def __init__(self, path: Path) -> None:
        """Read what was told before."""
        self._path = path
        self.current: dict[tuple[str, str], str] = {}
        """the texts of the episodes that last"""
        self.told: list[str] = []
        """what was told here of that which has no end"""
        self._passed: set[tuple[str, str]] = set()
        self._episodes: dict[tuple[str, str], int] = {}
        whole = b""
        if path.exists():
            told = path.read_bytes()
            whole = told[: told.rfind(b"\n") + 1]
            if whole != told:
                os.truncate(path, len(whole))
        for line in whole.splitlines():
            record = msgspec.json.decode(line, type=dict[str, Any])
            place = (record["kind"], record["of"])
            if record["phase"] == "start":
                self.current[place] = record["text"]
                self._episodes[place] = record.get("episode", 0)
            elif record["phase"] == "end":
                self.current.pop(place, None)
            else:
                self._passed.add(place)

    def tell(self, found: Iterable[Condition], now: float) -> int:
        """Tell what is new and what has ended; return how many lines that was."""
        lines: list[dict[str, Any]] = []
        lasting = set()
        for one in found:
            place = (one.kind, one.of)
            if one.passing:
                if place not in self._passed:
                    self._passed.add(place)
                    self.told.append(f"{one.kind} ({one.of}): {one.text}")
                    lines.append(_line("once", one, now))
                continue
            told = self._episodes.get(place, 0)
            if one.episode and (
                one.episode < told or (one.episode == told and place not in self.current)
            ):
                continue  # it was told to its end
            if place in self.current and one.episode > told:
                lines.append(self._end(place, now))
            if place not in self.current:
                lines.append(_line("start", one, now))
                self._episodes[place] = one.episode
            self.current[place] = one.text
            if not one.over:
                lasting.add(place)
            else:
                lines.append(self._end(place, now))
        lines += [self._end(place, now) for place in sorted(set(self.current) - lasting)]
        if lines:
            with self._path.open("ab") as file:
                file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
                file.flush()
                os.fsync(file.fileno())
        for line in lines:
            level = logging.INFO if line["phase"] == "end" else logging.WARNING
            _log.log(level, "%s %s (%s): %s", line["phase"], line["kind"], line["of"], line["text"])
        return len(lines)

    def _end(self, place: tuple[str, str], now: float) -> dict[str, Any]:
        return _line("end", Condition(*place, self.current.pop(place), {}), now)


def _line(phase: str, one: Condition, now: float) -> dict[str, Any]:
    moment = dt.datetime.fromtimestamp(now, dt.UTC).isoformat()
    episode = {"episode": one.episode} if one.episode else {}
    return {
        "phase": phase, "kind": one.kind, "of": one.of, "at": moment, "text": one.text, **episode, **one.details,
    }  # fmt: skip

"""Offsets: the position of a reader in each shard. `admitted` computes where a stream's next micro-batch ends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from taskqueue_core.errors import InvalidInput
from taskqueue_spark.journals.contract import HistoryMissing, Journal, ReadRange

_ALLOWED = 'earliest, latest, or JSON: {"<shard>": {"run": "<run>", "next": <position>}, …}'
_TRIALS = 4


class Offsets(dict[str, tuple[str, int]]):
    """The run and the next position to read, by shard."""

    def __init__(self, *indexes: Mapping[str, tuple[str, int]], **more: tuple[str, int]) -> None:
        super().__init__(*indexes, **more)
        self.marks: dict[str, str] = {}
        """by shard, the `Journal.mark` of the position, if known"""

    @classmethod
    def parse(cls, name: str, text: str) -> Offsets:
        """Parse the JSON value of the option ``name``. Raises `InvalidInput`."""
        try:
            decoded = json.loads(text)
        except ValueError:
            raise InvalidInput(name, "text that is not JSON", _ALLOWED) from None
        return cls.of(decoded, name)

    @classmethod
    def of(cls, value: Any, name: str = "offsets") -> Offsets:
        """Return offsets from the values that `plain` returns. An empty run matches any run. Raises `InvalidInput`."""
        if not isinstance(value, Mapping):
            raise InvalidInput(name, "JSON that is not an object", _ALLOWED)
        offsets = cls()
        for shard, slot in value.items():
            item = slot if isinstance(slot, Mapping) else {"next": slot}
            position, texts = item.get("next"), (item.get("run", ""), item.get("mark", ""))
            if type(position) is not int or position < 0 or {*map(type, texts)} != {str}:
                raise InvalidInput(name, "an invalid value for a shard", _ALLOWED)
            run, mark = texts
            offsets[shard] = run, position
            if mark:
                offsets.marks[shard] = mark
        return offsets

    @property
    def plain(self) -> dict[str, dict[str, str | int]]:
        """The offsets as values that JSON can represent."""
        indexes: dict[str, dict[str, str | int]] = {}
        for shard, (run, position) in sorted(self.items()):
            indexes[shard] = {"run": run, "next": position}
            if shard in self.marks:
                indexes[shard]["mark"] = self.marks[shard]
        return indexes

    @property
    def text(self) -> str:
        """The offsets as JSON, for the value of an option."""
        return json.dumps(self.plain)


def renamed(offsets: Offsets, runs: Mapping[str, str]) -> dict[str, str]:
    """Return the new names of renamed shards (such as moved files) by their old names.

    A shard is identified by its run. ``runs``: the current run of each shard.
    """
    known = {run for shard, (run, _) in offsets.items() if runs.get(shard) == run}
    names = {run: shard for shard, run in runs.items() if run and run not in known}
    return {shard: names[run] for shard, (run, _) in offsets.items() if run in names}


def checked(offsets: Offsets, spans: Mapping[str, ReadRange], *, fail: bool) -> Offsets:
    """Return the offsets, each moved to the nearest position that still exists, or to the start of the shard's new run.

    With ``fail``, raise `HistoryMissing` if an offset would have to be moved, or if a shard that was read is gone.
    """
    result = Offsets()
    names = renamed(offsets, {shard: span.run for shard, span in spans.items()})
    # Renamed shards come last and overwrite an old offset of the same name. Of two shards that were renamed to the
    # same name, the later position wins.
    for former in sorted(offsets, key=lambda name: (name in names, offsets[name][1])):
        run, position = offsets[former]
        shard = names.get(former, former)
        span = spans.get(shard)
        wrong = _wrong(run, position, span)
        if wrong and fail:
            raise HistoryMissing(shard, wrong)
        if span is None:
            result[shard] = run, position
        elif run and run != span.run:
            result[shard] = span.run, span.first
        else:
            result[shard] = span.run, min(max(position, span.first), span.end)
    return result


def _wrong(run: str, position: int, span: ReadRange | None) -> str | None:
    if span is None:
        return f"it no longer exists, and was read up to {position}" if position else None
    if run and run != span.run:
        return "its numbers start again: its store was emptied or its file replaced, and unread transitions are lost"
    if position < span.first:
        return f"the positions {position} to {span.first - 1} no longer exist"
    if position > span.end:
        return f"it ends at {span.end}, but was read up to {position}"
    return None


def admitted(
    journal: Journal,
    start: Offsets,
    ends: Mapping[str, ReadRange],
    rows: int | None,
    seconds: float | None,
) -> Offsets:
    """Return the end of the next micro-batch: after about ``rows`` transitions, or ``seconds`` of journal time.

    The micro-batch is never empty if there are new transitions. Unless a clock was set back, it ends at the same time
    in all shards, so that no shard is ahead. Transitions with the same time then stay together, even if they exceed
    the limit.
    """
    step = _Step(journal, start, ends)
    indexes = step.whole
    if rows is not None and step.behind:
        least = max(1, rows // len(step.behind))
        each = rows
        for trial in range(_TRIALS):
            indexes = step.to_row(each)
            taken = sum(
                journal.rows(shard, start[shard][1], indexes[shard]) for shard in step.behind
            )
            if taken <= rows or each == least:
                break
            each = least if trial == _TRIALS - 2 else max(least, each * rows // (taken + 1))
    if seconds is not None and step.behind:
        indexes = step.within(round(seconds * 1e6), indexes)
    return Offsets(
        {**start, **{shard: (ends[shard].run, index) for shard, index in indexes.items()}}
    )


class _Step:
    """The unread transitions from one offset to another, and the positions at which a micro-batch of them can end."""

    def __init__(self, journal: Journal, start: Offsets, ends: Mapping[str, ReadRange]) -> None:
        self._journal = journal
        self._start = {shard: start[shard][1] for shard in ends}
        self.whole = {
            shard: max(position.end, self._start[shard]) for shard, position in ends.items()
        }
        self.behind = [shard for shard, end in self.whole.items() if self._start[shard] < end]

    def to_row(self, number: int) -> dict[str, int]:
        """Return the positions of all shards at the time when the first of them has ``number`` new transitions."""
        first: tuple[int, str, int] | None = None
        for shard in self.behind:
            index = self._journal.after(shard, self._start[shard], number, self.whole[shard])
            time = self._journal.time(shard, index) if index < self.whole[shard] else None
            if time is not None and (first is None or time < first[0]):
                first = time, shard, index
        if first is None:
            return self.whole
        time, shard, index = first
        for cut in (self._at(time), self._at(time + 1)):
            if any(cut[name] > self._start[name] for name in self.behind):
                return cut
        # The times do not rise, because a clock was set back. Therefore advance only this shard.
        return {**self._start, shard: index}

    def within(self, span: int, most: dict[str, int]) -> dict[str, int]:
        """Return the positions ``span`` microseconds after the first new transition, but none beyond ``most``.

        Return ``most`` if there would be nothing to read otherwise.
        """
        times = [self._journal.time(shard, self._start[shard]) for shard in self.behind]
        first = min((time for time in times if time is not None), default=None)
        if first is None:
            return most
        cut = {shard: min(index, most[shard]) for shard, index in self._at(first + span).items()}
        return cut if any(cut[shard] > self._start[shard] for shard in self.behind) else most

    def _at(self, time: int) -> dict[str, int]:
        indexes = dict(self.whole)
        for shard in self.behind:
            indexes[shard] = self._journal.at(shard, time, self._start[shard], self.whole[shard])
        return indexes

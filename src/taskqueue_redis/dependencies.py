"""Lines between the partitions of the store, by which tasks learn of the ends of others; see the contract's module."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import msgspec

from taskqueue_core.after import TaskRef
from taskqueue_core.capabilities import Count, Line, LineKind, Report
from taskqueue_core.concurrency import gather_all
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.tasks import State
from taskqueue_redis.context import RedisContext
from taskqueue_redis.scripts.coalescer import split
from taskqueue_redis.scripts.runner import Arg
from taskqueue_redis.scripts.task_codec import name_of, ref_of
from taskqueue_redis.wakeups import RedisRoomSignal, channel_of

_AT_ONCE = 250
"""maximum number of lines that one script call reads"""
_PAGE_BYTES = 4 * 1024 * 1024
"""number of bytes of results after which a page ends"""
_NUMBERS: dict[State | None, int] = {
    None: 0,
    State.WAITING: 1,
    State.SCHEDULED: 2,
    State.DONE: 3,
    State.DEAD: 4,
    State.EXPIRED: 5,
    State.CANCELLED: 6,
    State.DISCARDED: 7,
    State.BLOCKED: 9,
    State.IN_FLIGHT: 10,
}
"""states by their numbers in scripts; ``None`` if a task is not known"""
_STATES = {number: state for state, number in _NUMBERS.items()}
_NO_CHILD = "-"
"""in the name of a line that concerns a batch"""
_RESULT = 8
"""place of the result in what ``after_lines`` returns for a line"""
_LIVE = _NUMBERS[State.WAITING]
_AGAIN = 11
"""in place of a state: children of an earlier task of the same name are still to be informed"""


class RedisDependencies:
    """The capability ``after`` of the Redis backend."""

    def __init__(self, context: RedisContext) -> None:
        self._context = context
        self._scripts = context.scripts
        self._signal: RedisRoomSignal | None = None

    async def lines(self, limit: int, after: str | None = None) -> tuple[Line, ...]:
        self._context.ensure_open()
        names = self._scripts.partitions.names
        start, _, position = (after or "0:").partition(":")
        found: list[Line] = []
        failures: list[BackendUnavailable] = []
        size = 0
        for place in range(int(start), len(names)):
            page: Any = [()]
            while page and len(found) < limit and size < _PAGE_BYTES:
                number = min(limit - len(found), _AT_ONCE)
                try:
                    page = await self._scripts.run("after_lines", names[place], number, position)
                except (
                    BackendUnavailable
                ) as failure:  # the lines of the other partitions are carried
                    failures.append(failure)
                    page = []
                found += [_line(place, entry) for entry in page]
                size += sum(len(entry[_RESULT]) for entry in page)
                position = page[-1][0] if page else ""
            if page:
                break
            position = ""
        if failures and not found:
            raise failures[0]
        return tuple(found)

    async def changed(self, seconds: float) -> None:
        self._context.ensure_open()
        if self._signal is None:
            names = self._scripts.partitions.names
            channels = tuple(channel_of(name, "lines", "") for name in names)
            signal = RedisRoomSignal(self._context.wakeups, channels)
            self._signal = await signal.__aenter__()  # until the backend is closed
            return  # lines may have come before
        await self._signal.wait(seconds)

    async def register(self, *lines: Line) -> tuple[Report | None, ...]:
        reports: dict[int, Report | None] = {}

        async def send(partition: str, places: Sequence[int]) -> None:
            items = [_registration(lines[place]) for place in places]
            answers = await self._scripts.run_each("after_register", partition, (), items)
            for place, answer in zip(places, answers, strict=True):
                reports[place] = _answer(lines[place], *answer)

        await self._each((line.parent for line in lines), send)
        return tuple(reports[place] for place in range(len(lines)))

    async def release(self, *reports: Report) -> None:
        async def send(partition: str, places: Sequence[int]) -> None:
            items = [_report(reports[place]) for place in places]
            for part in split(items, _AT_ONCE, _size):
                left = part
                while left:  # a call stops after the release of large tasks
                    some = chain.from_iterable(left)
                    left = left[await self._scripts.run("after_release", partition, *some) :]

        await self._each((report.child for report in reports), send)

    async def confirm(self, *lines: Line) -> None:
        by_place: dict[str, list[tuple[str, str]]] = {}
        for line in lines:
            place, _, number = line.id.partition(":")
            by_place.setdefault(place, []).append((number, _name(line)))

        async def send(place: str, named: Sequence[tuple[str, str]]) -> None:
            partition = self._scripts.partitions.names[int(place)]
            for start in range(0, len(named), _AT_ONCE):
                some = chain.from_iterable(named[start : start + _AT_ONCE])
                await self._scripts.run("after_confirm", partition, *some)

        self._context.ensure_open()
        await gather_all(send(place, named) for place, named in by_place.items())

    async def close(self, batch: TaskRef) -> bool:
        partition = self._scripts.partitions.of(batch.key)
        self._context.ensure_open()
        return bool(await self._scripts.run("after_close", partition, name_of(batch)))

    async def seal(self, batch: TaskRef) -> tuple[Count, ...]:
        self._context.ensure_open()
        names = self._scripts.partitions.names
        replies = await gather_all(
            self._scripts.run("after_seal", each, name_of(batch)) for each in names
        )
        return tuple(_count(batch, *answer) for (answer,) in replies)

    async def tally(self, *counts: Count, sealed: bool = False) -> None:
        async def send(partition: str, places: Sequence[int]) -> None:
            args = chain.from_iterable(_tallied(counts[place]) for place in places)
            await self._scripts.run("after_tally", partition, int(sealed), *args)

        await self._each((count.batch for count in counts), send)

    async def _each(
        self, refs: Iterable[TaskRef], send: Callable[[str, Sequence[int]], Awaitable[None]]
    ) -> None:
        """Call ``send`` at once for each partition of the tasks, with the positions of its tasks.

        If a partition is unavailable, the calls for the others have an effect all the same.
        """
        self._context.ensure_open()
        grouped: dict[str, list[int]] = {}
        for place, ref in enumerate(refs):
            grouped.setdefault(self._scripts.partitions.of(ref.key), []).append(place)
        await gather_all(send(partition, places) for partition, places in grouped.items())


def _answer(line: Line, state: int, result: bytes, version: int) -> Report | None:
    if state == _AGAIN:
        return None
    assert line.child is not None  # noqa: S101 - a line ``register`` has a child
    return Report(
        parent=line.parent,
        child=line.child,
        entry=line.entry,
        state=_STATES[state],
        version=version,
        result=result or None,
    )


def _name(line: Line) -> str:
    """Return the name of a line in scripts."""
    child = _NO_CHILD if line.child is None else name_of(line.child)
    return f"{line.kind} {name_of(line.parent)} {child}"


def _line(place: int, reply: Sequence[Any]) -> Line:
    number, kind, parent, child, entry, wanted, state, version, result, counts = reply
    line = Line(
        id=f"{place}:{number.decode()}",
        kind=LineKind(kind.decode()),
        parent=ref_of(parent.decode()),
        child=None if child == _NO_CHILD.encode() else ref_of(child.decode()),
        entry=entry.decode(),
        wants_result=bool(wanted),
        state=_STATES[state],
        version=int(version),
        result=result or None,
    )
    if line.kind is LineKind.COUNT:
        partition, *rest = counts
        line = msgspec.structs.replace(line, count=_count(line.parent, partition, version, *rest))
    return line


def _count(  # noqa: PLR0917 - in the order of the scripts
    batch: TaskRef,
    partition: bytes,
    version: bytes,
    closed: int,
    added: int,
    done: int,
    failed: int,
    dead: int,
) -> Count:
    return Count(
        batch=batch,
        partition=partition.decode(),
        version=int(version),
        closed=bool(closed),
        added=added,
        done=done,
        failed=failed,
        dead=dead,
    )


def _tallied(count: Count) -> Sequence[Arg]:
    numbers = count.added, count.done, count.failed, count.dead
    return name_of(count.batch), count.partition, count.version, int(count.closed), *numbers


def _registration(line: Line) -> Sequence[Arg]:
    assert line.child is not None  # noqa: S101 - a line ``register`` has a child
    return name_of(line.parent), name_of(line.child), line.entry, int(line.wants_result)


def _size(item: Sequence[Arg]) -> int:
    *_, result = item
    return len(result) if isinstance(result, bytes) else 0


def _report(report: Report) -> Sequence[Arg]:
    live = report.state is not None and report.state.live
    state = _LIVE if live else _NUMBERS[report.state]
    names = name_of(report.child), report.entry, name_of(report.parent)
    return *names, state, report.version, report.result or b""

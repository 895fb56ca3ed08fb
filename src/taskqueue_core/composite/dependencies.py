"""The ``dependencies`` of a composite backend: lines between its members, and between the shards of its queues.

Members know the parts of queues, and tasks know the public names of their parents. So the parent in a line is public
outside of the members, and in a line that goes to a member it is the part that may have it. A child stays as its member
names it; in front of the `Report.entry`, its member has a mark.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from msgspec import structs

from taskqueue_core.after import TaskRef
from taskqueue_core.capabilities import Count, Dependencies, Line, Report, dependencies_of
from taskqueue_core.composite.backend import CompositeBackend, QueuePart
from taskqueue_core.concurrency import first_completed, gather_all
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.limits import LIMITS

T = TypeVar("T")

_PAGE_BYTES = 4 * 1024 * 1024
"""size of the results in a page of lines at which the page ends"""
_MARK = "."
"""ends the number of a member in front of an entry; entries of members have none"""
_RENAMED = "~"
"""in front of an entry that is noted at a parent whose member calls it otherwise than the child: so the member does not
inform the child itself, under a name that the child does not know"""


class JointDependencies:
    """Implementation of `Dependencies` for a composite backend."""

    def __init__(self, composite: CompositeBackend) -> None:
        self._composite = composite
        self._of_member: list[Dependencies] = [
            dependencies_of(member.backend) for member in composite.members
        ]
        self._marks = len(self._of_member) > 1

    @property
    def _order(self) -> list[int]:
        """The members, optional ones last: what the others need does not wait for them."""
        composite = self._composite
        numbers = range(len(composite.members))
        return sorted(numbers, key=lambda n: composite.is_optional(composite.members[n]))

    async def lines(self, limit: int, after: str | None = None) -> tuple[Line, ...]:
        """Return the lines of the members, one member after the other. An unavailable optional member has none."""
        first, inner = (0, None) if after is None else _place_of(after)[::2]
        composite, nothing = self._composite, tuple[Line, ...]()
        found: list[Line] = []
        size = 0
        for number in range(first, len(self._of_member)):
            while len(found) < limit and size < _PAGE_BYTES:
                call = partial(self._of_member[number].lines, limit - len(found), inner)
                page = await composite.at_leisure(composite.members[number], call, nothing)
                if not page:
                    break
                found += [self._public(number, line) for line in page]
                size += sum(len(line.result or b"") for line in page)
                inner = page[-1].id
            inner = None
        return tuple(found)

    def _public(self, number: int, line: Line) -> Line:
        public = self._composite.public_name(number, line.parent.key)
        return structs.replace(
            line,
            id=f"{number}/{line.parent.key}/{line.id}",
            parent=TaskRef(public, line.parent.task_id),
            entry=self._marked(number, line.entry.removeprefix(_RENAMED)),
        )

    def _marked(self, number: int, entry: str) -> str:
        """Return an entry of a child that a member knows, with the mark of the child's member."""
        if not self._marks or not entry or _MARK in entry:
            return entry
        return f"{number}{_MARK}{entry}"

    def _unmarked(self, number: int, entry: str) -> str:
        """Return an entry as a member knows it: its own children have no mark."""
        return entry.removeprefix(f"{number}{_MARK}") if self._marks else entry

    async def changed(self, seconds: float) -> None:
        await first_completed(*(self._changed(each, seconds) for each in self._of_member))

    async def _changed(self, dependencies: Dependencies, seconds: float) -> None:
        try:
            await dependencies.changed(seconds)
        except BackendUnavailable:
            await asyncio.sleep(seconds)

    async def register(self, *lines: Line) -> tuple[Report | None, ...]:
        """Register children at all parts that may have their parents, and return what the part says that has one."""
        reports: dict[int, Report] = {}
        open_: set[int] = set()
        by_member = await self._by_member(lines, lambda line: line.parent)
        for number in self._order:
            items = by_member.get(number, [])
            for start in range(0, len(items), LIMITS.call):
                some = items[start : start + LIMITS.call]
                inner = [self._inner(number, lines[index], parent) for index, parent in some]
                answers = await self._register_at(number, inner)
                for (index, _), answer in zip(some, answers, strict=True):
                    if answer is None:
                        open_.add(index)
                    else:
                        line = lines[index]
                        public = structs.replace(answer, parent=line.parent, entry=line.entry)
                        reports[index] = _better(reports.get(index), public)
        for index in open_:
            if index in reports and reports[index].state is None:
                del reports[index]  # a part that did not answer may know the parent
        return tuple([reports.get(index) for index in range(len(lines))])

    async def _register_at(self, number: int, lines: Sequence[Line]) -> Sequence[Report | None]:
        """Register children at a member. Return ``None`` for each if it is optional and unavailable."""
        call = partial(self._of_member[number].register, *lines)
        nothing: tuple[Report | None, ...] = (None,) * len(lines)
        return await self._composite.at_leisure(self._composite.members[number], call, nothing)

    def _inner(self, number: int, line: Line, parent: TaskRef) -> Line:
        entry = self._unmarked(number, line.entry)
        if entry and parent.key != line.parent.key:
            entry = _RENAMED + entry
        return structs.replace(line, parent=parent, entry=entry)

    async def release(self, *reports: Report) -> None:
        by_member: dict[int, list[Report]] = {}
        for report in reports:
            mark, sign, _ = report.entry.partition(_MARK)
            number = int(mark) if self._marks and sign else 0
            inner = structs.replace(report, entry=self._unmarked(number, report.entry))
            by_member.setdefault(number, []).append(inner)
        for number in self._order:
            if items := by_member.get(number):
                call = partial(self._of_member[number].release, *items)
                await self._composite.ask(self._composite.members[number], call)

    async def confirm(self, *lines: Line) -> None:
        by_member: dict[int, list[Line]] = {}
        for line in lines:
            number, key, name = _place_of(line.id)
            inner = self._inner(number, line, TaskRef(key, line.parent.task_id))
            by_member.setdefault(number, []).append(structs.replace(inner, id=name))
        await gather_all(self._of_member[n].confirm(*items) for n, items in by_member.items())

    async def close(self, batch: TaskRef) -> bool:
        parts = await self._composite.parts(batch.key)
        closed = await gather_all(
            self._of_member[part.member].close(TaskRef(part.key, batch.task_id)) for part in parts
        )
        return any(closed)

    async def seal(self, batch: TaskRef) -> tuple[Count, ...]:
        counts = await gather_all(each.seal(batch) for each in self._of_member)
        return tuple(count for some in counts for count in some)

    async def tally(self, *counts: Count, sealed: bool = False) -> None:
        by_member = await self._by_member(counts, lambda count: count.batch)
        for number in self._order:
            items = by_member.get(number, [])
            inner = [structs.replace(counts[index], batch=batch) for index, batch in items]
            if inner:
                call = partial(self._of_member[number].tally, *inner, sealed=sealed)
                await self._composite.ask(self._composite.members[number], call)

    async def _by_member(
        self, items: Sequence[T], ref: Callable[[T], TaskRef]
    ) -> dict[int, list[tuple[int, TaskRef]]]:
        """Return, by member, the position of each item with the names that its task may have there."""
        parts: dict[str, Sequence[QueuePart]] = {}
        found: dict[int, list[tuple[int, TaskRef]]] = {}
        for index, item in enumerate(items):
            key, task_id = ref(item).key, ref(item).task_id
            if key not in parts:
                parts[key] = await self._composite.current_parts(key)
            for part in parts[key]:
                found.setdefault(part.member, []).append((index, TaskRef(part.key, task_id)))
        return found


def _place_of(name: str) -> tuple[int, str, str]:
    """Return the member of a line, the key of its parent there, and its id there."""
    number, key, inner = name.split("/", 2)
    return int(number), key, inner


def _better(known: Report | None, found: Report) -> Report:
    """Return the report of the part that has the parent; of two such parts, of that where it is live."""
    if known is None or known.state is None:
        return found
    if found.state is not None and found.state.live and not known.state.live:
        return found
    return known

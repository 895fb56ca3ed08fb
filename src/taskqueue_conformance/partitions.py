"""Steps for tests of tasks that wait for others, also for tasks of another backend."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from taskqueue_conformance.bench import KEY, Bench
from taskqueue_core.after import PARENT_ENDED, After, TaskRef
from taskqueue_core.capabilities import Count, Dependencies, Line, Report, dependencies_of
from taskqueue_core.consumer.carrier import carry
from taskqueue_core.tasks import State, TaskStatus

T = TypeVar("T")
A = TypeVar("A")


def after(*parents: str, key: str = KEY, **fields: Any) -> After:
    """Return an `After` of tasks in one queue, by their ids."""
    return After(tasks=tuple(TaskRef(key, parent) for parent in parents), **fields)


async def status_of(bench: Bench, task_id: str, key: str = KEY) -> TaskStatus:
    """Return the status of a task that the store knows."""
    (status,) = await bench.control.statuses(key, task_id)
    assert status is not None, f"{task_id} is unknown"
    return status


async def carry_all(*benches: Bench) -> None:
    """Carry lines between the partitions of one or two backends, until there are none."""
    dependencies = joint(*benches)
    while True:
        carried, left = await carry(dependencies)
        assert not left, "lines were not carried"
        if not carried:
            return


async def is_cancelled(bench: Bench, task_id: str, reason: str = PARENT_ENDED) -> None:
    """Fail unless a task is cancelled for this reason, once all lines were carried."""
    await carry_all(bench)
    status = await status_of(bench, task_id)
    assert (status.state, status.error) == (State.CANCELLED, reason)


def joint(*benches: Bench) -> Dependencies:
    """Return the dependencies of one backend, or of two, of which the first has only the queue `KEY` and its shards."""
    members = [dependencies_of(bench.backend) for bench in benches]
    if len(members) == 1:
        return members[0]
    return JointDependencies(members, lambda key: not key.startswith(KEY))


class JointDependencies:
    """The lines of several backends. ``place`` returns the number of the backend that has a queue."""

    def __init__(self, members: Sequence[Dependencies], place: Callable[[str], int]) -> None:
        self.members = members
        self.place = place

    async def lines(self, limit: int, after: str | None = None) -> tuple[Line, ...]:
        """Return the lines of the members, one member after the other."""
        number, _, inner = (after or "0-").partition("-")
        for position in range(int(number), len(self.members)):
            if lines := await self.members[position].lines(limit, inner or None):
                return tuple(_named(line, f"{position}-{line.id}") for line in lines)
            inner = ""
        return ()

    async def changed(self, seconds: float) -> None:
        """Wait for new lines of the first member."""
        await self.members[0].changed(seconds)

    async def register(self, *lines: Line) -> tuple[Report | None, ...]:
        """Register children with the members that have their parents."""
        answers = await self._by_place(
            lines, lambda line: line.parent.key, lambda member, part: member.register(*part)
        )
        return tuple(answers)

    async def release(self, *reports: Report) -> None:
        """Report to the members that have the children."""

        async def release(member: Dependencies, part: list[Report]) -> list[None]:
            await member.release(*part)
            return [None] * len(part)

        await self._by_place(reports, lambda report: report.child.key, release)

    async def confirm(self, *lines: Line) -> None:
        """Confirm lines with the members that they are of."""
        for position, member in enumerate(self.members):
            own = [line for line in lines if line.id.startswith(f"{position}-")]
            if own:
                await member.confirm(*(_named(line, line.id.partition("-")[2]) for line in own))

    async def close(self, batch: TaskRef) -> bool:
        """Close a batch where it is."""
        return await self.members[self.place(batch.key)].close(batch)

    async def seal(self, batch: TaskRef) -> tuple[Count, ...]:
        """Close a batch in all members."""
        counts = [await member.seal(batch) for member in self.members]
        return tuple(count for part in counts for count in part)

    async def tally(self, *counts: Count, sealed: bool = False) -> None:
        """Report counts to the members that have the batches."""

        async def tally(member: Dependencies, part: list[Count]) -> list[None]:
            await member.tally(*part, sealed=sealed)
            return [None] * len(part)

        await self._by_place(counts, lambda count: count.batch.key, tally)

    async def _by_place(
        self,
        items: Sequence[T],
        key: Callable[[T], str],
        call: Callable[[Dependencies, list[T]], Awaitable[Sequence[A]]],
    ) -> list[A]:
        places = [self.place(key(item)) for item in items]
        answers: dict[int, A] = {}
        for position in sorted(set(places)):
            numbers = [number for number, place in enumerate(places) if place == position]
            found = await call(self.members[position], [items[number] for number in numbers])
            answers |= dict(zip(numbers, found, strict=True))
        return [answers[number] for number in range(len(items))]


def _named(line: Line, name: str) -> Line:
    fields = {field: getattr(line, field) for field in line.__struct_fields__}
    return Line(**fields | {"id": name})

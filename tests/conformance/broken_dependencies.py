"""Backends that break the promises to tasks that wait for others."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from taskqueue_core.after import TaskRef
from taskqueue_core.capabilities import Count, Line, LineKind, Report
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import (
    Confirmation,
    Delivery,
    QueueStats,
    Received,
    Settled,
    State,
    Task,
    TaskStatus,
)
from tests.conformance.facade import (
    FacadeControl,
    FacadeDependencies,
    FacadePublisher,
    FacadeSubscription,
)


class DoesNotWait(FacadePublisher):
    """Stores tasks that wait for others as waiting."""

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        """Break the promise of `publish`."""
        return await self.inner.publish(*(structs.replace(task, after=None) for task in tasks))


class LosesLines(FacadeDependencies):
    """Deletes lines when they are read, and not when they are confirmed."""

    async def lines(self, limit: int, after: str | None = None) -> tuple[Line, ...]:
        """Break the promise of `lines`."""
        found: tuple[Line, ...] = await self.inner.lines(limit, after)
        await self.inner.confirm(*found)
        return found


class ForgetsEnds(FacadeDependencies):
    """Does not know a parent that is forgotten, although its end was not confirmed."""

    async def register(self, *lines: Line) -> tuple[Report, ...]:
        """Break the promise of `register`."""
        reports: tuple[Report, ...] = await self.inner.register(*lines)
        control, answers = self.facade.inner.control, list[Report]()
        for report in reports:
            (known,) = await control.statuses(report.parent.key, report.parent.task_id)
            answers.append(report if known else structs.replace(report, state=None))
        return tuple(answers)


class IgnoresVersions(FacadeDependencies):
    """Takes a late report for a new one."""

    number = 1000

    async def release(self, *reports: Report) -> None:
        """Break the promise of `release`."""
        for report in reports:
            self.number += 1
            await self.inner.release(structs.replace(report, version=self.number))


class IgnoresEntries(FacadeDependencies):
    """Takes a report for an earlier task with the same id."""

    async def release(self, *reports: Report) -> None:
        """Break the promise of `release`."""
        for report in reports:
            found = self.facade.inner._store.find(report.child.key, report.child.task_id)
            entry = report.entry if found is None or found.wait is None else found.wait.entry
            await self.inner.release(structs.replace(report, entry=entry))


class LosesInputs(FacadeSubscription):
    """Delivers inputs only the first time."""

    async def receive(self, limit: int, timeout: float | None) -> Received:
        """Break the promise of `receive`."""
        received = await self.inner.receive(limit, timeout)
        seen = self.facade.tokens
        given = list[Delivery]()
        for delivery in received.deliveries:
            name = (delivery.task.key, delivery.task.id, "inputs")
            given.append(structs.replace(delivery, inputs=()) if name in seen else delivery)
            seen.add(name)
        return structs.replace(received, deliveries=tuple(given))


class MixesInputs(FacadeSubscription):
    """Delivers inputs in the order of the parents, and not in the one that was asked for."""

    async def receive(self, limit: int, timeout: float | None) -> Received:
        """Break the promise of `receive`."""
        received = await self.inner.receive(limit, timeout)
        return structs.replace(received, deliveries=tuple(map(self.mixed, received.deliveries)))

    def mixed(self, delivery: Delivery) -> Delivery:
        """Return a delivery with its inputs in another order."""
        if not delivery.inputs or delivery.task.after is None:
            return delivery
        pairs = sorted(zip(delivery.task.after.inputs, delivery.inputs, strict=True))
        return structs.replace(delivery, inputs=tuple(result for _, result in pairs))


class ForgetsOldResults(FacadePublisher):
    """Gives a task no results of parents that were done before its publish."""

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        """Break the promise of `publish`."""
        for task in tasks:
            for ref in task.after.tasks if task.after else ():
                parent = self.facade.inner._store.find(ref.key, ref.task_id)
                if parent is not None:
                    parent.result_until = 0.0
        return await self.inner.publish(*tasks)


class LeavesLargeInputsOut(FacadeSubscription):
    """Releases a task without the results that are too large together, instead of making it a dead letter."""

    async def ack(
        self, *deliveries: Delivery, results: Sequence[bytes | None] = ()
    ) -> tuple[Settled, ...]:
        """Break the promise of `ack`."""
        small = [each if len(each or b"") < LIMITS.payload // 2 else None for each in results]
        return await self.inner.ack(*deliveries, results=small)


class SealsNothing(FacadeDependencies):
    """Counts the members of a batch without closing it."""

    async def seal(self, batch: TaskRef) -> tuple[Count, ...]:
        """Break the promise of `seal`."""
        counts = self.facade.inner._store.batches.counts
        before = counts.get(batch)
        found: tuple[Count, ...] = await self.inner.seal(batch)
        if before is not None:
            counts[batch] = before
        return found


class CountsTheDead(FacadeDependencies):
    """Takes a dead letter for a member that has ended."""

    async def tally(self, *counts: Count, sealed: bool = False) -> None:
        """Break the promise of `tally`."""
        those = [
            structs.replace(count, failed=count.failed + count.dead, dead=0) for count in counts
        ]
        await self.inner.tally(*those, sealed=sealed)


class EndsWithTheFirstCount(FacadeDependencies):
    """Takes the counts of some partitions for those of all."""

    async def tally(self, *counts: Count, sealed: bool = False) -> None:  # noqa: ARG002 - it is ignored
        """Break the promise of `tally`."""
        await self.inner.tally(*counts, sealed=True)


class TakesOldCounts(FacadeDependencies):
    """Takes a late count for a new one."""

    number = 1000

    async def tally(self, *counts: Count, sealed: bool = False) -> None:
        """Break the promise of `tally`."""
        first, self.number = self.number, self.number + len(counts)
        late = [structs.replace(count, version=first + n) for n, count in enumerate(counts)]
        await self.inner.tally(*late, sealed=sealed)


class ForgetsHolders(FacadeDependencies):
    """Does not report dead letters of other partitions."""

    async def release(self, *reports: Report) -> None:
        """Break the promise of `release`."""
        await self.inner.release(*(each for each in reports if each.state is not State.DEAD))


class ReportsToTheNext(FacadeDependencies):
    """Reports the end of a task also to children of a later task with its id."""

    async def lines(self, limit: int, after: str | None = None) -> tuple[Line, ...]:
        """Break the promise of `release`."""
        found: tuple[Line, ...] = await self.inner.lines(limit, after)
        records = [r for q in self.facade.inner._store.queues.values() for r in q.records.values()]
        for line in found:
            for record in records if line.kind is LineKind.END else ():
                known = record.task.after
                if record.wait is not None and known and line.parent in known.tasks:
                    child = TaskRef(record.task.key, record.task.id)
                    report = Report(
                        parent=line.parent,
                        child=child,
                        entry=record.wait.entry,
                        state=line.state,
                        version=line.version,
                    )
                    await self.inner.release(report)
        return found


class ShowsAllParents(FacadeControl):
    """Shows all tasks for which a task was ever to wait."""

    async def statuses(self, key: str, *task_ids: str) -> tuple[TaskStatus | None, ...]:
        """Break the promise of `TaskStatus.waits_for`."""
        answers = list[TaskStatus | None]()
        for status in await self.inner.statuses(key, *task_ids):
            record = status and self.facade.inner._store.find(key, status.task_id)
            after = record and record.task.after
            answers.append(
                structs.replace(status, waits_for=after.tasks) if status and after else status
            )
        return tuple(answers)


class CountsTheReleased(FacadeControl):
    """Counts tasks as held for ever."""

    most = 0

    async def stats(self, key: str) -> QueueStats:
        """Break the promise of `QueueStats.blocked_on_dead`."""
        stats = await self.inner.stats(key)
        self.most = max(self.most, stats.blocked_on_dead)
        return structs.replace(stats, blocked_on_dead=self.most)


class CountsDeadParents(FacadeControl):
    """Counts each dead letter that holds a task, instead of the task."""

    async def stats(self, key: str) -> QueueStats:
        """Break the promise of `QueueStats.blocked_on_dead`."""
        stats = await self.inner.stats(key)
        records = self.facade.inner._store.known(key).records.values()
        return structs.replace(
            stats, blocked_on_dead=sum(len(r.wait.dead) for r in records if r.wait is not None)
        )

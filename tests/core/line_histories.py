"""Random histories of tasks that wait for others in several stores with lines that are lost, repeated or reordered."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from taskqueue_core.after import UNKNOWN_PARENT, After, OnDead, TaskRef, When
from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import (
    Line,
    LineKind,
    Report,
    control_of,
    dead_letters_of,
    dependencies_of,
)
from taskqueue_core.consumer.carrier import report_in
from taskqueue_core.tasks import Published, State, Task, TaskStatus

_NAMES = 12
_BATCH = "batch"


class Message(NamedTuple):
    """A line on its way, and what is to be done next with it."""

    place: int
    """number of the store that has the line"""
    line: Line
    report: Report | None = None
    """the report that is to be delivered before the line is confirmed"""
    carried: bool = False
    """whether it only has to be confirmed"""


class Known(NamedTuple):
    """What has really become of a task so far."""

    done: bool
    over: bool
    """whether it was a dead letter, or has ended"""
    failed: bool
    """whether it was a dead letter, or has ended otherwise than done"""


class History:
    """One random history. It fails if a task is released early or twice, or is blocked at the end."""

    def __init__(self, backends: Sequence[Backend], chance: random.Random) -> None:
        self.backends = backends
        self.chance = chance
        self.lines = [dependencies_of(backend) for backend in backends]
        self.controls = [control_of(backend) for backend in backends]
        self.letters = [dead_letters_of(backend) for backend in backends]
        self.consumers = [backend.subscribe([f"k{n}"], "w") for n, backend in enumerate(backends)]
        self.tasks: dict[str, Task] = {}
        self.orphans: set[str] = set()
        """tasks of which a parent was not stored before"""
        self.members: set[str] = set()
        self.dead: set[str] = set()
        """tasks that are or were dead letters"""
        self.deliveries = Counter[str]()
        self.redrives = Counter[str]()
        self.closed = False
        self.mail: list[Message] = []
        self.counts = Counter[str]()

    def place(self, name: str) -> int:
        """Return the number of the store that a task is in."""
        return (0 if name == _BATCH else int(name)) % len(self.backends)

    def ref(self, name: str) -> TaskRef:
        """Return the name of a task with its queue."""
        return TaskRef(f"k{self.place(name)}", name)

    async def status(self, name: str) -> TaskStatus | None:
        """Return the status of a task."""
        (status,) = await self.controls[self.place(name)].statuses(self.ref(name).key, name)
        return status

    async def known(self, name: str) -> Known:
        """Return what has become of a task."""
        status = await self.status(name)
        if status is None:
            return Known(done=False, over=False, failed=False)
        done, dead = status.state is State.DONE, name in self.dead
        ended = not status.state.live and status.state is not State.DEAD
        return Known(done=done, over=ended or dead, failed=dead or (ended and not done))

    async def play(self, steps: int) -> None:
        """Do random steps; then carry all lines, and let all tasks run."""
        await self.offer(Task(key="k0", id=_BATCH, batch=self.ref(_BATCH)))
        moves: list[Callable[[], Awaitable[object]]] = [
            self.publish, self.publish, self.run, self.run, self.cancel, self.revive, self.read, self.read,
            self.deliver, self.deliver, self.deliver, self.close,
        ]  # fmt: skip
        for _ in range(steps):
            await self.chance.choice(moves)()
        await self.finish()

    async def offer(self, task: Task) -> Published:
        """Publish a task in its store."""
        publisher = self.backends[self.place(task.id)].publisher
        (answer,) = await publisher.publish(task)
        return answer.status

    async def publish(self) -> None:
        """Publish the next task. It waits for some others, of which few are not published before."""
        if len(self.tasks) == _NAMES:
            return
        name, chance = str(len(self.tasks)), self.chance
        others = list(self.tasks)
        if chance.random() < 0.05:
            others.append(str(_NAMES))
        parents = chance.sample(others, min(len(others), chance.choice((0, 1, 1, 2, 3))))
        after = None
        if parents:
            when: When = chance.choice(("done", "done", "ended", "failed"))
            on_dead: OnDead = chance.choice(("hold", "hold", "cancel"))
            inputs, refs = tuple(range(len(parents))), tuple(map(self.ref, parents))
            after = After(tasks=refs, when=when, on_dead=on_dead, inputs=inputs)
        member = chance.random() < 0.3
        task = Task(
            key=self.ref(name).key, id=name, after=after, batch=self.ref(_BATCH) if member else None
        )
        if await self.offer(task) is Published.REFUSED:
            assert self.closed, "a member of an open batch was refused"
            task = Task(key=task.key, id=name, after=after)
            assert await self.offer(task) is Published.ACCEPTED
        elif member:
            self.members.add(name)
        if not self.tasks.keys() >= set(parents):
            self.orphans.add(name)
        self.tasks[name] = task

    async def run(self, failures: float = 0.25) -> int:
        """Let a task of a store run; return how many did."""
        place = self.chance.randrange(len(self.backends))
        consumer, ran = self.consumers[place], 0
        for delivery in (await consumer.receive(1, 0)).deliveries:
            name, ran = delivery.task.id, ran + 1
            self.deliveries[name] += 1
            assert self.deliveries[name] <= 1 + self.redrives[name], f"{name} was released twice"
            await self.check_release(name, delivery.inputs)
            if self.chance.random() < failures:
                self.dead.add(name)
                await consumer.dead_letter(delivery, "why")  # type: ignore[attr-defined]
            else:
                await consumer.ack(delivery, results=[name.encode()])
            self.counts["run"] += 1
        return ran

    async def check_release(self, name: str, inputs: Sequence[bytes | None]) -> None:
        """Fail unless the parents of a task are, or were, as it asks."""
        after = self.tasks[name].after
        if after is None:
            return
        parents = [await self.known(parent.task_id) for parent in after.tasks]
        met = {
            "done": all(parent.done for parent in parents),
            "ended": all(parent.over for parent in parents),
            "failed": any(parent.failed for parent in parents),
        }
        assert met[after.when], f"{name} was released early"
        self.counts[after.when] += 1
        if after.when == "done":
            assert inputs == tuple(parent.task_id.encode() for parent in after.tasks)

    async def cancel(self) -> None:
        """Cancel a random task, now and then."""
        if self.tasks and self.chance.random() < 0.3:
            name = self.chance.choice(list(self.tasks))
            await self.controls[self.place(name)].cancel(self.ref(name).key, name)

    async def revive(self) -> None:
        """Redrive or discard a dead letter."""
        names = sorted(self.dead)
        if names:
            name = self.chance.choice(names)
            letters, key = self.letters[self.place(name)], self.ref(name).key
            if self.chance.random() < 0.3:
                await letters.discard(key, name)
            else:
                self.redrives[name] += await letters.redrive(key, name)

    async def close(self) -> None:
        """Close the batch, now and then."""
        if self.chance.random() < 0.2:
            self.closed = True
            await self.lines[0].close(self.ref(_BATCH))

    async def read(self) -> None:
        """Read some lines of a store. They are on their way then, perhaps not for the first time."""
        place = self.chance.randrange(len(self.backends))
        page = await self.lines[place].lines(self.chance.randint(1, 5))
        self.mail += [Message(place, line) for line in page]

    async def deliver(self) -> None:
        """Lose a random message, or do what it asks for; then it may come a second time."""
        if not self.mail:
            return
        place = self.chance.randrange(len(self.mail))
        fate = self.chance.random()
        message = self.mail[place] if 0.15 < fate < 0.4 else self.mail.pop(place)
        if fate > 0.15:
            self.counts["repeated"] += fate < 0.4
            following = await self.carry(message)
            if following is not None:
                self.mail.append(following)
        else:
            self.counts["lost"] += 1

    async def carry(self, message: Message) -> Message | None:
        """Do what a message asks for. Return what follows from it."""
        place, line, report, carried = message
        if carried:
            await self.lines[place].confirm(line)
            return None
        if report is not None:
            await self.lines[self.place(report.child.task_id)].release(report)
        elif line.kind is LineKind.REGISTER:
            (report,) = await self.lines[self.place(line.parent.task_id)].register(line)
            return Message(place, line, report)
        elif line.kind is LineKind.END:
            return Message(place, line, report_in(line))
        elif line.count is not None:
            await self.lines[0].tally(line.count)
        else:
            counts = [count for lines in self.lines for count in await lines.seal(line.parent)]
            await self.lines[0].tally(*counts, sealed=True)
        return Message(place, line, carried=True)

    async def finish(self) -> None:
        """Carry all lines and let all tasks run. Fail if one is left blocked, or was cancelled without a reason."""
        await self.lines[0].close(self.ref(_BATCH))
        self.closed, idle = True, 0
        while idle < 20 * len(self.backends):
            idle += 1
            for place, lines in enumerate(self.lines):
                for line in await lines.lines(100):
                    following: Message | None = Message(place, line)
                    while following is not None:
                        following, idle = await self.carry(following), 0
            if await self.run(failures=0.0):
                idle = 0
            for name in self.dead:
                moved = await self.letters[self.place(name)].redrive(self.ref(name).key, name)
                self.redrives[name] += moved
                idle = 0 if moved else idle
        for name, task in self.tasks.items():
            await self.check_end(name, task.after)
        batch = await self.status(_BATCH)
        members = [(await self.known(name)).done for name in self.members]
        assert batch is not None
        assert batch.state is (State.DONE if all(members) else State.CANCELLED)

    async def check_end(self, name: str, after: After | None) -> None:
        """Fail unless a task has ended as it must."""
        status = await self.status(name)
        assert status is not None
        assert status.state in {State.DONE, State.CANCELLED, State.DISCARDED}, f"{name} never ended"
        if status.state is State.CANCELLED and status.error is not None and after is not None:
            parents = [await self.known(parent.task_id) for parent in after.tasks]
            if status.error == UNKNOWN_PARENT:
                assert name in self.orphans
            elif after.when == "failed":
                assert all(parent.over for parent in parents)
            else:
                assert any(parent.failed for parent in parents)
            self.counts[status.error] += 1

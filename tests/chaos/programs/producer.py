"""A producer that publishes batches, repeating each until it is confirmed; it continues where its last start ended."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import Sequence
from pathlib import Path

from taskqueue_core.backend import Backend
from taskqueue_core.errors import BackendUnavailable, PublishUnconfirmed
from taskqueue_core.loading import load_backend
from taskqueue_core.tasks import Confirmation, Published, Task
from tests.chaos.history import Event, Log, What, merge
from tests.chaos.programs.common import Setup
from tests.chaos.programs.plans import Plan, plan_of

_PAUSE = 0.03


class Producer:
    """One start of a producer."""

    def __init__(self, setup: Setup, log: Log, backend: Backend, over: asyncio.Event) -> None:
        self.setup = setup
        self.log = log
        self.backend = backend
        self.over = over

    async def run(self) -> None:
        """Publish the remaining tasks."""
        doubtful, following = self._left_over()
        if doubtful:
            await self._publish(doubtful)
        await self.backend.health()  # also reads the store's time
        loop = asyncio.get_running_loop()
        due = loop.time()
        while following < self.setup.tasks and not self.over.is_set():
            numbers = range(following, min(following + self.setup.batch, self.setup.tasks))
            await self._publish([self._task(plan_of(self.setup, n)) for n in numbers])
            following = numbers.stop
            due = max(due + self.setup.pace, loop.time() - self.setup.pace)
            await asyncio.sleep(due - loop.time())

    def _left_over(self) -> tuple[list[Task], int]:
        """Return the tasks that earlier starts published without getting an answer, and the next task number."""
        calls: dict[str, Event] = {}
        following = 0
        for event in merge(Path(name) for name in self.setup.before):
            if event.what is What.PUBLISH:
                calls[event.task] = event
                following = max(following, int(event.task.partition("-")[2]) + 1)
            elif event.what is What.PUBLISHED and event.outcome in {"accepted", "duplicate"}:
                calls.pop(event.task, None)
        tasks = [
            self._made(
                plan_of(self.setup, int(name.partition("-")[2])), call.not_before, call.deadline
            )
            for name, call in calls.items()
        ]
        return tasks, following

    def _task(self, plan: Plan) -> Task:
        now = self.backend.now()
        return self._made(
            plan,
            None if plan.delay is None else now + plan.delay,
            None if plan.lifetime is None else now + plan.lifetime,
        )

    def _made(self, plan: Plan, not_before: float | None, deadline: float | None) -> Task:
        return Task.of(
            plan.key,
            {"will": plan.will, "padding": "x" * plan.padding},
            id=plan.id,
            priority=plan.priority,
            not_before=not_before,
            deadline=deadline,
            tenant=plan.tenant,
            ordering_key=plan.ordering_key,
        )

    async def _publish(self, tasks: Sequence[Task]) -> None:
        pending = list(tasks)
        while pending and not self.over.is_set():
            pending = await self._send(pending)
            if pending:
                await asyncio.sleep(_PAUSE)

    async def _send(self, tasks: list[Task]) -> list[Task]:
        """Publish once; return the tasks that have to be published again."""
        try:
            answers = await self.publish_once(tasks)
        except (PublishUnconfirmed, BackendUnavailable):
            return tasks
        if any(answer.status is Published.CONFLICT for answer in answers):
            raise AssertionError("the same id and payload, and the store says that they differ")
        return [task for task, told in zip(tasks, answers, strict=True) if not told.stored]

    async def publish_once(self, tasks: Sequence[Task]) -> Sequence[Confirmation]:
        """Publish once and record the call and its answers. Errors are raised as the backend contract says."""
        call = self.log.next_call()
        for task in tasks:
            self.log.note(
                What.PUBLISH,
                call=call,
                key=task.key,
                task=task.id,
                priority=task.priority,
                not_before=task.not_before,
                deadline=task.deadline,
                tenant=task.tenant or "",
                ordering_key=task.ordering_key or "",
                payload=f"{zlib.crc32(task.payload):08x}",
            )
        outcomes = ["unconfirmed"] * len(tasks)
        try:
            answers = await self.backend.publisher.publish(*tasks)
            outcomes = [answer.status.value for answer in answers]
        except BackendUnavailable:
            outcomes = ["unavailable"] * len(tasks)
            raise
        finally:
            for task, outcome in zip(tasks, outcomes, strict=True):
                self.log.note(
                    What.PUBLISHED, call=call, key=task.key, task=task.id, outcome=outcome
                )
        return answers


async def run(setup: Setup, log: Log, over: asyncio.Event) -> None:
    """Publish everything, then close the backend."""
    async with contextlib.aclosing(load_backend(setup.word)) as backend:
        await Producer(setup, log, backend, over).run()

"""Publishes the steps of workflows, and cancels workflows. Any number of servers and workers may do it at once.

Doing it twice changes nothing: the ids of the steps follow from the workflow, and no step runs before the task that
holds them is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import NoReturn

from taskqueue_core.backend import Backend, Subscription
from taskqueue_core.capabilities import (
    QueueSettings,
    control_of,
    dead_letters_of,
    dependencies_of,
)
from taskqueue_core.concurrency import gather_all
from taskqueue_core.consumer.carrier import register
from taskqueue_core.consumer.outage import Failures, close
from taskqueue_core.consumer.settle import decided, settle
from taskqueue_core.errors import CapabilityMissing, InvalidInput, SettingsConflict
from taskqueue_core.publish_order import in_parts
from taskqueue_core.retry import Failed, HandBack, Outcome, Rejected, Snoozed, Success
from taskqueue_core.tasks import Confirmation, Delivery, Published, State
from taskqueue_core.workflow_graph import Graph, read_graph, stored_steps
from taskqueue_core.workflows import (
    WORKFLOWS,
    Stored,
    WorkflowStep,
    cancel_id,
    graph_of,
    is_part,
    levels,
    read_stored,
    relay_id,
    step_id,
    tasks_of,
)

_KEPT = 7 * 86_400.0
"""seconds for which a workflow is remembered"""
_LOOK, _LOOK_ALONE = 0.5, 0.02
"""seconds between two looks for workflows, and the same for a store that only this process uses"""
_LINGER = 60.0
"""seconds without work after which the subscription is closed, so that a store without workflows shows none"""
_AT_ONCE = 20
"""maximum number of workflows that are received at once"""
_BATCH = 200
"""number of steps in one call"""
_FRESH = 1.0
"""seconds after which this process asks again whether a workflow is still its own, before it publishes steps"""
_AGAIN = 1.0
"""seconds after which a workflow is cancelled again whose steps have added steps that are not published yet"""
_log = logging.getLogger("taskqueue.workflows")


async def expand_workflows(backend: Backend) -> NoReturn:
    """Work on the workflows of a backend until cancelled. Log only the first of several failures in a row."""
    expander, failures = Expander(backend), Failures(_log, "workflows were not expanded")
    look = _LOOK if backend.capabilities.shared else _LOOK_ALONE
    while True:
        try:
            if await expander.has_work():
                await expander.serve()
            failures.clear()
        except Exception as error:  # noqa: BLE001 - the loop must continue after any error
            failures.add(error)
        pause = failures.pause if failures.number else look
        await asyncio.sleep(pause * random.uniform(0.75, 1.25))  # noqa: S311 - it only spreads the load


class Expander:
    """Takes tasks from the internal queue of workflows, and does what they ask for."""

    def __init__(self, backend: Backend) -> None:
        """Use a backend with the capabilities ``after``, ``control`` and ``dead_letters``. There is no I/O."""
        self._backend = backend
        self._control = control_of(backend)
        self._dependencies = dependencies_of(backend)
        self._dead_letters = dead_letters_of(backend)

    async def has_work(self) -> bool:
        """Return whether there are tasks in the internal queue that wait for no others."""
        ledger = await self._control.ledger(WORKFLOWS)
        return bool(ledger.waiting or ledger.scheduled or ledger.in_flight)

    async def serve(self) -> None:
        """Work until there has been nothing to do for a minute."""
        async with self._subscribed() as subscription:
            while await self.work(subscription, _LINGER):
                pass

    async def drain(self) -> None:
        """Work until nothing is due."""
        if await self.has_work():
            async with self._subscribed() as subscription:
                while await self.work(subscription, 0):
                    pass

    @contextlib.asynccontextmanager
    async def _subscribed(self) -> AsyncIterator[Subscription]:
        await self._configure()
        subscription = self._backend.subscribe([WORKFLOWS], f"{WORKFLOWS}-{secrets.token_hex(4)}")
        try:
            yield subscription
        finally:
            await close(subscription)

    async def work(self, subscription: Subscription, seconds: float) -> bool:
        """Receive tasks and do them, waiting up to some seconds for the first. Return False if there was nothing."""
        received = await subscription.receive(_AT_ONCE, seconds)
        for delivery in received.deliveries:
            taken = asyncio.get_running_loop().time()
            outcome = await self._outcome(delivery, taken)
            settings = await self._control.settings(WORKFLOWS)
            verb = decided(outcome, delivery, settings, random.random)
            await settle(self._backend, subscription, delivery, verb)
        return bool(received.deliveries or received.again)

    async def _configure(self) -> None:
        """Let workflows be remembered for long, unless the queue has settings already."""
        if not (await self._control.settings(WORKFLOWS)).version:
            wanted = QueueSettings(result_ttl=_KEPT, dedupe_window=_KEPT)
            with contextlib.suppress(SettingsConflict):
                await self._control.configure(WORKFLOWS, wanted)

    async def _outcome(self, delivery: Delivery, taken: float) -> Outcome:
        task = delivery.task
        if is_part(task.payload):
            return Success(task.payload)
        try:
            stored = read_stored(task.payload)
            if stored.cancel:
                return await self._cancel(stored.workflow)
            steps = await self._steps(task.id, stored)
            again = delivery.attempt > 1 or delivery.losses > 0
            if again and await self._state(cancel_id(stored.workflow)) is not None:
                await self._cancel_steps(stored.workflow, steps)
            else:
                outcome = await self._publish(delivery, stored, steps, taken)
                if outcome is not None:
                    return outcome
                # The order to cancel a workflow waits until it is published, but not for what its steps have added.
                if stored.by and await self._state(cancel_id(stored.workflow)) is not None:
                    await self._cancel_steps(stored.workflow, steps)
        except InvalidInput as error:
            return Rejected(error.code, str(error))
        except CapabilityMissing as error:
            return Rejected(error.code, str(error))
        return Success(graph_of(stored, steps))

    async def _steps(self, task_id: str, stored: Stored) -> tuple[WorkflowStep, ...]:
        steps = await stored_steps(self._control, task_id, stored)
        if not steps:
            raise InvalidInput("workflow", "no steps, or a part that is not stored", "all steps")
        return steps

    async def _state(self, task_id: str) -> State | None:
        (status,) = await self._control.statuses(WORKFLOWS, task_id)
        return None if status is None else status.state

    # Publishing

    async def _publish(
        self, delivery: Delivery, stored: Stored, steps: Sequence[WorkflowStep], taken: float
    ) -> Outcome | None:
        """Publish all steps; return why the task is not done, or ``None`` if it is.

        No step is published before its parents are stored: a queue may refuse one of them, because it is full or is
        being moved, and a task that waits for an unknown one is cancelled.
        """
        tasks = tasks_of(stored.workflow, steps, delivery.task.id)
        loop = asyncio.get_running_loop()
        done = 0
        for places in in_parts(tasks, _BATCH):
            # Another process may have published the steps since, and they may have ended and been forgotten.
            if loop.time() - taken > _FRESH:
                if not await self._control.progress(delivery, done / len(tasks)):
                    return HandBack()
                taken = loop.time()
            for answer in await self._backend.publisher.publish(*[tasks[n] for n in places]):
                if not answer.stored:
                    return _refused(answer)
            done += len(places)
        await register(self._dependencies, tasks)
        return None

    # Cancelling

    async def _cancel(self, workflow: str) -> Outcome:
        graph, known = await self._graph(workflow), -1
        while graph is not None and len(graph.steps) > known:
            known = len(graph.steps)
            await self._cancel_steps(workflow, graph.steps)
            # Look for what the steps have added before they were cancelled.
            graph = await self._graph(workflow)
        again = False
        for holder in () if graph is None else (graph.main, *graph.additions):
            if holder.state is State.DEAD:
                await self._dead_letters.discard(WORKFLOWS, holder.task_id)
            elif holder.held_by:  # the step that added the steps is a dead letter
                await self._control.cancel(WORKFLOWS, holder.task_id)
            else:
                again = again or holder.state.live
        return Snoozed(_AGAIN) if again else Success()

    async def _graph(self, workflow: str) -> Graph | None:
        return await read_graph(self._control, self._dead_letters, workflow)

    async def _cancel_steps(self, workflow: str, steps: Sequence[WorkflowStep]) -> None:
        """Cancel children before their parents, so that the end of a parent releases none of them."""
        for level in reversed(levels(steps)):
            tasks = [(step.key, step_id(workflow, step.name)) for step in level]
            tasks += [(WORKFLOWS, relay_id(workflow, step.name)) for step in level if step.others]
            for start in range(0, len(tasks), _BATCH):
                await gather_all(
                    self._control.cancel(key, task_id)
                    for key, task_id in tasks[start : start + _BATCH]
                )


def _refused(answer: Confirmation) -> Outcome:
    """Return what becomes of a workflow one of whose steps was not stored."""
    if answer.status is Published.CONFLICT:
        text = f"queue {answer.key!r} has another task with the id {answer.task_id!r}"
        return Rejected("id_conflict", text)
    text = f"queue {answer.key!r} refused the step {answer.task_id!r}: {answer.reason}"
    if answer.retry_after is None:
        return Rejected(str(answer.code), text)
    return Failed(text)

"""A process that publishes workflows, repeating each until it is confirmed; it continues where its last start ended."""

from __future__ import annotations

import asyncio
import contextlib
import random
import zlib
from pathlib import Path
from typing import Any

from taskqueue_core.assembly import open_backend
from taskqueue_core.errors import BackendUnavailable, PublishUnconfirmed
from taskqueue_core.queue import Queue
from taskqueue_core.workflows import WorkflowStep, step_id
from tests.chaos.history import Log, What, merge
from tests.chaos.points import PointedBackend, Points
from tests.chaos.programs.common import Setup

_PAUSE = 0.03
_WILLS = (*["ack"] * 8, "retry", "bury once", "bury once")
_WHENS = (*["done"] * 6, "ended", "failed")
_ADDING = (*_WILLS, *["add"] * 5)
_LARGE = 5
"""of so many workflows, one is so large that it is stored in parts"""
_PADDING = 60_000


def steps_of(setup: Setup, number: int) -> list[WorkflowStep]:
    """Return the steps of a workflow: the same ones in each start of the process."""
    chance = random.Random(f"{setup.seed} {setup.number} {number}")
    padding = "x" * (_PADDING if number % _LARGE == _LARGE - 1 else 1)
    steps: list[WorkflowStep] = []
    for place in range(chance.randint(3, 8)):
        before = [step.name for step in steps]
        after = chance.sample(before, min(place, chance.choice((0, 1, 1, 2, 3))))
        steps.append(
            WorkflowStep.of(
                f"s{place}",
                chance.choice(setup.keys),
                {"will": chance.choice(_ADDING if setup.steps else _WILLS), "padding": padding},
                after=tuple(after),
                when=chance.choice(_WHENS) if after else "done",
            )
        )
    return steps


class Planner:
    """One start of a planner."""

    def __init__(self, setup: Setup, log: Log, queue: Queue) -> None:
        self._setup = setup
        self._log = log
        self._queue = queue

    async def run(self, over: asyncio.Event) -> None:
        """Publish the workflows that are not confirmed yet."""
        called: dict[int, bool] = {}
        for event in merge(Path(name) for name in self._setup.before):
            if event.what in {What.PUBLISH, What.PUBLISHED}:
                number = int(event.task.partition(".")[0].partition("-")[2])
                stored = event.outcome in {"accepted", "duplicate"}
                called[number] = called.get(number, False) or stored
        for number in range(self._setup.tasks):
            while not called.get(number) and not over.is_set():
                called[number] = await self._put(number)
                await asyncio.sleep(_PAUSE if not called[number] else self._setup.pace)

    async def _put(self, number: int) -> bool:
        """Publish a workflow once, and record its steps; return whether it is stored."""
        workflow = f"{self._setup.number}-{number}"
        steps, call, outcome = steps_of(self._setup, number), self._log.next_call(), "unconfirmed"
        keys = {step.name: step.key for step in steps}
        for step in steps:
            parents = [f"{keys[str(name)]}/{step_id(workflow, str(name))}" for name in step.after]
            self._log.note(
                What.PUBLISH,
                call=call,
                key=step.key,
                task=step_id(workflow, step.name),
                payload=f"{zlib.crc32(step.payload):08x}",
                origin="step",
                after=tuple(parents),
                when=step.when,
            )
        try:
            outcome = (await self._queue.workflows.put(steps, id=workflow)).status.value
        except BackendUnavailable:
            outcome = "unconfirmed"  # a part may be stored, or the whole workflow
        except PublishUnconfirmed:
            pass
        finally:
            for step in steps:
                task = step_id(workflow, step.name)
                self._log.note(What.PUBLISHED, call=call, key=step.key, task=task, outcome=outcome)
        return outcome in {"accepted", "duplicate"}


async def run(setup: Setup, log: Log, over: asyncio.Event) -> None:
    """Publish all workflows, then close the backend."""
    async with contextlib.aclosing(open_backend(setup.word).inner) as backend:
        used: Any = backend
        if setup.word != "server":
            used = PointedBackend(backend, Points(Path(setup.log).parent), log)
        await Planner(setup, log, Queue(used)).run(over)

"""A client that submits jobs of several tenants, or the jobs of a poisonous one."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

from taskqueue_core.config import load_settings
from taskqueue_core.errors import BackendUnavailable, PublishUnconfirmed
from taskqueue_core.json_text import encode_json
from taskqueue_core.loading import load_backend
from taskqueue_dispatch.config import DispatchSettings
from taskqueue_dispatch.jobs import Submission, model_of_queue, task_of
from taskqueue_dispatch.service import Dispatcher
from taskqueue_dispatch.submit import NoSlots
from tests.chaos.history import Log, What
from tests.chaos.programs.common import Setup

BEGIN = "begin"
"""name of a file with the time of the monotonic clock at which clients begin"""
_PAUSE = 0.03
_TENANTS = ("t1", "t2", "t3")
_POISON = (*["fail"] * 6, "refuse", "over", "stubborn", "foreign", "huge")
_HOSTS = 20
"""number of hosts that hang"""


def jobs(setup: Setup) -> Iterator[tuple[Submission, bool]]:
    """Yield the jobs of a client, and whether the callback of each goes to a host that answers."""
    chance = random.Random(f"{setup.seed} {setup.number}")
    for number in range(setup.tasks):
        key = chance.choice(setup.keys)
        will = chance.choice(_POISON) if setup.poisonous else "ok"
        long = will in {"over", "stubborn"}
        seconds = chance.uniform(0.8, 1.4) if long else chance.uniform(0.02, 0.08)
        hangs = setup.poisonous and chance.random() < 0.75
        host = f"127.0.1.{chance.randint(1, _HOSTS)}" if hangs else "127.0.0.1"
        yield (
            Submission(
                model=model_of_queue(key) or "",
                payload=encode_json("payload", {"will": will, "seconds": seconds}),
                tenant="poisonous" if setup.poisonous else _TENANTS[number % len(_TENANTS)],
                callback_url=f"http://{host}:{setup.port}/{key}",
                idempotency_key=f"{setup.name}-{number}",
            ),
            not hangs,
        )


async def _submit(dispatcher: Dispatcher, log: Log, job: Submission, target: str) -> None:
    """Submit a job until it is confirmed."""
    task = task_of(job)
    while True:
        call, outcome = log.next_call(), "unconfirmed"
        told = {"key": task.key, "task": task.id, "call": call}
        log.note(What.PUBLISH, tenant=task.tenant or "", target=target, **told)
        try:
            answer = await dispatcher.submit(job)
            outcome = "refused" if isinstance(answer, NoSlots) else "accepted"
        except (BackendUnavailable, PublishUnconfirmed):
            pass
        finally:
            log.note(What.PUBLISHED, outcome=outcome, **told)
        if outcome == "accepted":
            return
        await asyncio.sleep(_PAUSE)


async def _begin(setup: Setup, log: Log) -> float:
    """Return when to begin, which the run writes into a file once all clients have started."""
    log.note(What.PHASE, name="serving")
    signal = Path(setup.log).parent / BEGIN
    loop, found = asyncio.get_running_loop(), asyncio.Event()
    while not (signal.exists() and signal.stat().st_size):
        loop.call_later(_PAUSE, found.set)
        await found.wait()
        found.clear()
    return float(signal.read_text()) + setup.after


async def run(setup: Setup, log: Log, over: asyncio.Event) -> None:
    """Submit all jobs, each at its time whether or not the ones before were answered."""
    async with contextlib.aclosing(load_backend(setup.word)) as backend:
        dispatcher = Dispatcher(backend, load_settings(DispatchSettings))
        await backend.health()
        loop = asyncio.get_running_loop()
        begin = await _begin(setup, log)
        async with asyncio.TaskGroup() as group:
            for number, (job, answers) in enumerate(jobs(setup)):
                await asyncio.sleep(begin + number * setup.pace - loop.time())
                if over.is_set():
                    break
                target = "callback" if answers else ""
                group.create_task(_submit(dispatcher, log, job, target))
        await dispatcher.caller.aclose()

"""Workflows under faults of processes: publishers and expanders that are killed at any point."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from asyncio.subprocess import PIPE
from collections import Counter

from taskqueue_core.consumer.expander import Expander
from taskqueue_core.queue import Queue
from taskqueue_core.workflows import WORKFLOWS, WorkflowState
from taskqueue_redis import RedisBackend
from tests.redis.backends import PATIENCE, opened
from tests.redis.recount import recounted
from tests.redis.servers import RedisServer

STEPS = 6
OPEN = """
import asyncio, itertools, sys

from pydantic import SecretStr
from taskqueue_core.consumer.expander import expand_workflows
from taskqueue_core.queue import Queue
from taskqueue_core.workflows import WorkflowStep
from taskqueue_redis import RedisBackend, RedisSettings


def opened(url, prefix):
    return RedisBackend(
        settings=RedisSettings(url=SecretStr(url), prefix=prefix, lease=2.0, _env_file=None)
    )
"""
PUBLISH = f"""{OPEN}

async def main(url, prefix):
    queue = Queue(opened(url, prefix))
    for turn in itertools.count():
        text = "x" * (60_000 if turn % 2 else 1)  # every second one is stored in parts
        steps = [
            WorkflowStep.of(f"s{{n}}", f"work{{n % 3}}", text, after=(f"s{{n - 1}}",) if n else ())
            for n in range({STEPS})
        ]
        await queue.workflows.put(steps, id=f"w{{turn}}")
        print(turn, flush=True)


asyncio.run(main(*sys.argv[1:]))
"""
EXPAND = f"""{OPEN}
asyncio.run(expand_workflows(opened(*sys.argv[1:])))
"""


async def _ran(backend: RedisBackend, ran: Counter[str]) -> int:
    """Run what is available; return how many tasks there were."""
    async with backend.subscribe([f"work{n}" for n in range(3)], "w") as consumer:
        received = await consumer.receive(1000, 0)
        ran.update(each.task.id for each in received.deliveries)
        if received.deliveries:
            await consumer.ack(*received.deliveries)
        return len(received.deliveries)


async def test_publishers_and_expanders_are_killed(
    redis_server: RedisServer, redis_prefix: str
) -> None:
    """U16, fault A1: SIGKILL of a publisher and of expanders; each stored workflow runs whole, each step once."""
    draw = random.Random(7)
    words = (sys.executable, "-c", PUBLISH, redis_server.url, redis_prefix)
    publisher = await asyncio.create_subprocess_exec(*words, stdout=PIPE)
    assert publisher.stdout is not None
    async with asyncio.timeout(PATIENCE):
        for _ in range(40):
            assert await publisher.stdout.readline()
    publisher.send_signal(signal.SIGKILL)
    rest = (await publisher.communicate())[0]
    stored = 40 + len(rest.splitlines())
    ran: Counter[str] = Counter()
    async with opened(redis_server.url, redis_prefix, lease=2.0) as backend:
        words = (sys.executable, "-c", EXPAND, redis_server.url, redis_prefix)
        for _ in range(6):
            before = (await backend.control.ledger("work0")).published
            process = await asyncio.create_subprocess_exec(*words)
            async with asyncio.timeout(PATIENCE):
                while (await backend.control.ledger("work0")).published <= before + draw.randrange(
                    9
                ):
                    await backend.control.maintain()
                    if (await backend.control.ledger(WORKFLOWS)).waiting == 0:
                        break
                    await asyncio.sleep(draw.random() / 100)
            process.send_signal(signal.SIGKILL)
            await process.wait()
            await _ran(backend, ran)
        async with asyncio.timeout(PATIENCE):
            while True:
                await backend.control.maintain()
                await Expander(backend).drain()
                number = await _ran(backend, ran)
                ledger = await backend.control.ledger(WORKFLOWS)
                if not (number or ledger.waiting or ledger.in_flight or ledger.blocked):
                    break
        workflows = Queue(backend).workflows
        for turn in range(stored):
            found = await workflows.get(f"w{turn}")
            assert found is not None
            assert found.state is WorkflowState.ENDED
            assert [ran[f"w{turn}.s{n}"] for n in range(STEPS)] == [1] * STEPS
        half = await workflows.get(
            f"w{stored}"
        )  # stored, but the publisher did not hear of it; or not at all
        assert {ran[f"w{stored}.s{n}"] for n in range(STEPS)} == {int(half is not None)}
        assert set(ran.values()) == {1}
        recounted(redis_server, redis_prefix)

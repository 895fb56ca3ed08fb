"""Dispatchers that are killed at each step of a job's way: another one sees the job to its end."""

from __future__ import annotations

import asyncio
import subprocess
from collections import Counter

import pytest

from taskqueue_dispatch.gpu.simulated import SimulatedGpu
from taskqueue_dispatch.models import ModelConfig, ModelType
from tests.dispatch import receivers
from tests.dispatch.killed import process
from tests.dispatch.killed_program import Step, Told
from tests.dispatch.receivers import receiving
from tests.dispatch.support import (
    ASKED,
    FAST,
    all_free,
    dispatching,
    ended,
    ledger_of,
    send,
    serve,
    until,
)
from tests.redis.backends import housekept, opened
from tests.redis.servers import RedisServer

_SYNC = ModelConfig(poll_endpoint_template=ASKED, poll_interval=0.05, max_poll_time=5)
_ASYNC = _SYNC.model_copy(update={"model_type": ModelType.ASYNC})
_CASES = [
    *((step, _SYNC) for step in Step if step is not Step.POLLED),
    (Step.POLLED, _ASYNC),
    (Step.SENT, _ASYNC),
    (Step.REPORTED, _ASYNC),
]
_EVERY_DAY = [(Step.SENT, _SYNC), (Step.ANSWERED, _SYNC), (Step.REPORTED, _ASYNC)]
"""the server has the job, it has done it, its client knows: the others are among the long tests"""


@pytest.mark.parametrize(
    ("step", "config"),
    [
        pytest.param(
            *case,
            id=f"{case[0]}-{case[1].model_type}",
            marks=() if case in _EVERY_DAY else pytest.mark.long,
        )
        for case in _CASES
    ],
)
async def test_killed_at_a_step(
    step: Step,
    config: ModelConfig,
    parent: subprocess.Popen[bytes],
    redis_server: RedisServer,
    redis_prefix: str,
) -> None:
    """A dispatcher's SIGKILL loses no job, runs none twice where the server tells, and leaks no slot.

    Every callback is sent at least once, each time with the same id (fault H2, OPEN-C2, FIX-C8, C10, R15, R16).
    """
    async with (
        SimulatedGpu(name="a", slots=2, latency=0.3, asynchronous=config is _ASYNC) as gpu,
        receiving() as receiver,
        opened(redis_server.url, redis_prefix) as backend,
        housekept(backend),
    ):
        policy = receivers.settings(receiver).model_dump(include={
            "callback_http", "callback_networks", "callback_ports"
        })  # fmt: skip
        async with dispatching(backend, **policy) as first:
            await serve(first, "flux/ü {1}", gpu, config=config)
        told = Told(redis_server.url, redis_prefix, FAST | policy, step)
        async with process(parent, told) as child, dispatching(backend, **policy) as submitting:
            await submitting.stop()
            url = f"http://127.0.0.1:{receiver.port}/done"
            ids = await send(submitting, "flux/ü {1}", 3, callback_url=url)
            async with asyncio.timeout(10):
                assert await child.wait() < 0
        async with dispatching(backend, **policy) as heir:
            await ended(heir, ids)
            await until(lambda: len({call.body for call in receiver.calls}) == 3)
            await until(lambda: all_free(backend), "every slot has come back")
        assert gpu.most_at_once <= 2
        assert set(gpu.runs) == set(ids)
        assert set(gpu.runs.values()) == {1}
        told_of = Counter(call.headers["webhook-id"] for call in receiver.calls)
        assert len(told_of) == 3
        ledger = await ledger_of(backend, "flux/ü {1}")
        assert ledger.balanced
        assert ledger.done == 3

"""Tests of dispatchers that are killed at each step of a job; another dispatcher completes the job."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections import Counter
from typing import Any

import pytest

from taskqueue_dispatch.gpu_server.simulator import SimulatedGpu
from taskqueue_dispatch.models import ModelConfig, ModelType
from taskqueue_dispatch.names import CALLBACKS
from tests.dispatch import calling_back, receivers
from tests.dispatch.killed import process
from tests.dispatch.killed_program import Step, Told
from tests.dispatch.patience import PATIENCE, until
from tests.dispatch.receivers import OK, Receiver, receiving, sending
from tests.dispatch.support import ASKED, FAST, all_free, dispatching, ended, ledger_of, send, serve
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
"""the steps of the quick tests; the other steps are in the long tests"""


def _calling(receiver: Receiver) -> dict[str, Any]:
    """Return settings that allow a dispatcher to call the receiver."""
    names = {"callback_http", "callback_networks", "callback_ports"}
    return receivers.settings(receiver).model_dump(include=names)


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
    """SIGKILL of a dispatcher loses no job, runs none twice if the server reports its jobs, and leaks no slot.

    Every callback is sent at least once, always with the same id (fault H2, OPEN-C2, FIX-C8, C10, R15, R16).
    """
    async with (
        SimulatedGpu(name="a", slots=2, latency=0.3, asynchronous=config is _ASYNC) as gpu,
        receiving() as receiver,
        opened(redis_server.url, redis_prefix) as backend,
        housekept(backend),
    ):
        policy = _calling(receiver)
        async with dispatching(backend, **policy) as first:
            await serve(first, "flux/ü {1}", gpu, config=config)
        told = Told(redis_server.url, redis_prefix, FAST | policy, step)
        async with process(parent, told) as child, dispatching(backend, **policy) as submitting:
            await submitting.stop()
            url = f"http://127.0.0.1:{receiver.port}/done"
            ids = await send(submitting, "flux/ü {1}", 3, callback_url=url)
            async with asyncio.timeout(PATIENCE):
                assert await child.wait() < 0
        async with dispatching(backend, **policy) as heir:
            await ended(heir, ids)
            await until(lambda: len({call.body for call in receiver.calls}) == 3)
            await until(lambda: all_free(backend), "every slot is free again")
        assert gpu.most_at_once <= 2
        assert set(gpu.runs) == set(ids)
        assert set(gpu.runs.values()) == {1}
        told_of = Counter(call.headers["webhook-id"] for call in receiver.calls)
        assert len(told_of) == 3
        ledger = await ledger_of(backend, "flux/ü {1}")
        assert ledger.balanced
        assert ledger.done == 3


async def test_killed_after_a_callback(
    parent: subprocess.Popen[bytes], redis_server: RedisServer, redis_prefix: str
) -> None:
    """If a dispatcher is killed before it records a callback's delivery, the callback is sent again (R15, fault I2)."""
    stay = asyncio.Event()

    async def holds(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await stay.wait()

    async with (
        opened(redis_server.url, redis_prefix) as backend,
        housekept(backend),
        receiving(holds, OK) as receiver,
    ):
        job = calling_back.job_for(receiver)
        told = Told(redis_server.url, redis_prefix, FAST | _calling(receiver))
        async with process(parent, told) as child:
            await calling_back.tell(backend, job)
            await until(lambda: len(receiver.calls) == 1)
            child.send_signal(signal.SIGKILL)
            assert await child.wait() == -signal.SIGKILL
        async with sending(backend, receivers.settings(receiver)) as sender:
            (record,) = await calling_back.ended(sender, job)
        (status,) = await backend.control.statuses(CALLBACKS, record.webhook_id)
        ledger = await backend.control.ledger(CALLBACKS)
    assert status is not None
    assert (record.state, status.attempt, status.losses) == ("delivered", 1, 1)
    assert len(receiver.calls) == 2
    assert calling_back.ids(receiver.calls) == {record.webhook_id}
    assert len({call.body for call in receiver.calls}) == 1
    assert (ledger.published, ledger.done, ledger.imbalance) == (1, 1, 0)

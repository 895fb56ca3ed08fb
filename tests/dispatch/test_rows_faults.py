"""Tests of a dispatcher whose slots are deleted from the store, or whose process is frozen, on a real Redis."""

from __future__ import annotations

import signal
import subprocess

from taskqueue_dispatch.gpu_server.simulator import SimulatedGpu
from taskqueue_dispatch.models import ModelConfig
from tests.dispatch.killed import process
from tests.dispatch.killed_program import Told
from tests.dispatch.patience import until
from tests.dispatch.support import ASKED, FAST, Gate, dispatching, ended, ledger_of, send, serve
from tests.redis.backends import housekept, keys_of, opened
from tests.redis.servers import RedisServer

_TOLD = ModelConfig(poll_endpoint_template=ASKED, poll_interval=0.05, max_poll_time=60)


async def test_the_pool_is_deleted_under_running_jobs(
    redis_server: RedisServer, redis_prefix: str
) -> None:
    """If the slot pool is deleted, running jobs get their slots back, and no job runs twice.

    Endpoints and configuration are restored (fault H9).
    """
    gate = Gate()
    async with (
        SimulatedGpu(name="a", slots=2, handler=gate) as gpu,
        opened(redis_server.url, redis_prefix, lease=10.0) as backend,
        dispatching(backend) as dispatcher,
    ):
        await serve(dispatcher, "flux", gpu, config=_TOLD)
        ids = await send(dispatcher, "flux", 5)
        await until(lambda: gpu.active == 2)
        before = await dispatcher.pool.inspect()
        pool = [key for key in keys_of(redis_server, redis_prefix) if ":slots" in key]
        assert pool
        redis_server.call("DEL", *pool)

        async def held_again() -> bool:
            view = await dispatcher.pool.inspect()
            jobs = {lease.job for lease in view.leases if lease.job is not None}
            return view.epoch != before.epoch and jobs == set(ids[:2])

        await until(held_again, "both jobs have their slots again")
        assert gpu.active == 2
        gate.open()
        await ended(dispatcher, ids)
        assert set(gpu.runs) == set(ids)
        assert set(gpu.runs.values()) == {1}
        assert (gpu.most_at_once, gpu.refused) == (2, 0)
        view = await dispatcher.pool.inspect()
        assert [info.endpoint for info in view.endpoints] == [
            info.endpoint for info in before.endpoints
        ]
        assert await dispatcher.registry.config("flux") == _TOLD
        assert (await ledger_of(backend, "flux")).done == 5


async def test_a_dispatcher_that_is_frozen(
    parent: subprocess.Popen[bytes], redis_server: RedisServer, redis_prefix: str
) -> None:
    """While a frozen dispatcher's job still runs, its expired slot is not given away.

    When the dispatcher continues, its late settlement changes nothing. Another dispatcher fetches the result once the
    job has ended (fault H3, fault H2, OPEN-C3, OPEN-C4, R16).
    """
    fast, gate = FAST | {"lease": 0.6}, Gate()
    async with (
        SimulatedGpu(name="a", slots=1, handler=gate) as gpu,
        opened(redis_server.url, redis_prefix) as backend,
        housekept(backend),
    ):
        async with dispatching(backend, **fast) as first:
            await serve(first, "flux", gpu, config=_TOLD)
        async with process(parent, Told(redis_server.url, redis_prefix, fast)) as child:
            async with dispatching(backend, **fast) as submitting:
                await submitting.stop()
                ids = await send(submitting, "flux", 2)
            await until(lambda: gpu.active == 1)
            child.send_signal(signal.SIGSTOP)
            async with dispatching(backend, **fast) as heir:

                async def overdue() -> bool:
                    (info,) = (await heir.pool.inspect()).endpoints
                    return (info.overdue, info.free, info.usable) == (1, 0, True)

                await until(overdue, "the lease has expired, and the slot is not free")
                assert (gpu.active, gpu.posts) == (1, 1), "the job still runs on its server, alone"
                gate.open()
                await ended(heir, ids)
                result = await heir.jobs.result(ids[0])
                child.send_signal(signal.SIGCONT)
                new = await send(heir, "flux", 2)
                await ended(heir, new)
                assert await heir.jobs.result(ids[0]) == result
        assert set(gpu.runs) == {*ids, *new}
        assert set(gpu.runs.values()) == {1}
        assert (gpu.most_at_once, gpu.refused) == (1, 0)
        ledger = await ledger_of(backend, "flux")
        assert ledger.balanced
        assert ledger.done == 4

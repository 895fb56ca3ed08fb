"""How a worker keeps the policies of its queues: those of the store, applied or not."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from taskqueue_core import (
    QueueLimits,
    RateLimit,
    Reject,
    Snooze,
    TaskDead,
    Tasks,
    connect,
)
from taskqueue_core.backend import Capabilities, Capability
from taskqueue_core.capabilities import Owner, QueueSettings, control_of
from taskqueue_core.retry import RetryPolicy
from taskqueue_core.tasks import State
from taskqueue_memory import MemoryBackend
from taskqueue_server import ServerProcess
from taskqueue_worker import LocalWorker, Worker
from tests.application.running import OpenWorld, working
from tests.ports import free_port
from tests.server.access import entry, write
from tests.server.support import eventually, running, settings

ONCE = RetryPolicy(max_attempts=1)
WORKER = "tq_only-works"


class Shared(MemoryBackend):
    """A memory backend that claims to be shared, so that workers do not apply their declarations."""

    capabilities = Capabilities(names=frozenset(Capability), shared=True)


def sleeping(seconds: float, **options: Any) -> Tasks:
    """Return a registry with a task that sleeps."""
    tasks = Tasks()

    @tasks.task("sleep", **options)
    async def sleep() -> str:
        await asyncio.sleep(seconds)
        return "slept"

    return tasks


async def _end_of(
    tasks: Tasks,
    backend: MemoryBackend,
) -> tuple[State, str | None]:
    """Run one task; return its last state and its error."""
    async with connect(backend) as queue, tasks.connect(queue):
        handle = await tasks.functions["sleep"].publish()
        status = None
        while status is None or status.state not in (State.DONE, State.DEAD, State.SCHEDULED):
            await asyncio.sleep(0.005)
            status = await handle.status()
        return status.state, status.error


async def test_a_store_of_this_process_gets_the_declarations() -> None:
    """U3: a worker on the memory backend applies its declarations when it starts; one on a shared store does not."""
    tasks = sleeping(0, timeout=30, limits=QueueLimits(max_inflight=7))
    backend = MemoryBackend()
    async with working(LocalWorker(tasks, backend=backend)):
        assert (await _end_of(tasks, backend))[0] is State.DONE
        kept = await backend.control.settings("sleep")
        assert (kept.timeout, kept.retry.max_attempts) == (30, 10)
    shared = Shared()
    worker = LocalWorker(tasks, backend=shared)
    async with working(worker):
        assert (await _end_of(tasks, shared))[0] is State.DONE
        assert await shared.control.settings("sleep") == QueueSettings()
    worker.configure(apply=True)
    async with working(worker):
        await _end_of(tasks, shared)
        assert (await shared.control.settings("sleep")).max_inflight == 7


@pytest.mark.parametrize(
    ("stored", "declared", "state"),
    [
        (QueueSettings(retry=ONCE, timeout=0.02), None, State.DEAD),
        (QueueSettings(retry=ONCE, timeout=0.02), 60, State.DEAD),
        (QueueSettings(retry=ONCE), 0.02, State.DEAD),
        (QueueSettings(retry=ONCE, timeout=60), 0.02, State.DONE),
        (QueueSettings(retry=ONCE, owners={"timeout": Owner.OPERATOR}), 0.02, State.DONE),
    ],
)
async def test_the_stored_timeout_decides(
    stored: QueueSettings, declared: float | None, state: State
) -> None:
    """U3, U4: the timeout of the store ends an attempt; a declared one does only while the store's has no owner."""
    backend = Shared()
    await backend.control.configure("sleep", stored)
    tasks = sleeping(60 if state is State.DEAD else 0.1, timeout=declared)
    async with working(LocalWorker(tasks, backend=backend)):
        assert (await _end_of(tasks, backend))[0] is state
    if state is State.DEAD:
        (letter,) = await backend.dead_letters.list("sleep")
        assert letter.history[-1].error == "timeout after 0.02 s"


async def test_differences_are_logged_once(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """U3, U4: at its start a worker says which settings differ from its declarations, also with a token to consume."""
    backend = MemoryBackend()
    await backend.control.configure(
        "sleep", QueueSettings(timeout=9, owners={"timeout": Owner.OPERATOR})
    )
    tasks = sleeping(0, timeout=30)
    tokens = write(tmp_path / "tokens.toml", entry(WORKER, verbs=["consume"]))
    async with running(backend, tokens_file=tokens) as it:
        worker = Worker(tasks, url=it.server.url, token=WORKER)
        with caplog.at_level(logging.WARNING, "taskqueue.worker"):
            async with working(worker):
                await eventually(lambda: "differ from the declarations" in caplog.text)
                async with connect(backend) as queue, tasks.connect(queue):
                    assert await (await tasks.functions["sleep"].publish()).result(5) == "slept"
    records = [record for record in caplog.records if "differ" in record.getMessage()]
    assert len(records) == 1
    assert "sleep: retry, timeout (set by an operator);" in records[0].getMessage()


@pytest.mark.parametrize("asked", [False, True])
async def test_an_empty_store_is_noticed(caplog: pytest.LogCaptureFixture, *, asked: bool) -> None:
    """U3: after a restart of a server with a memory store, the worker compares again, or applies again with --apply.

    The messages name the whole command, and what an apply has changed.
    """
    port, seen = free_port(), "differ" if not asked else "declarations applied, changed:"
    worker = Worker(sleeping(0, timeout=30), url=f"http://127.0.0.1:{port}")
    worker.target = "shop.tasks:tasks"
    worker.configure(apply=asked)

    def messages() -> list[str]:
        return [each.getMessage() for each in caplog.records if seen in each.getMessage()]

    caplog.set_level(logging.INFO, "taskqueue.worker")
    async with AsyncExitStack() as stack:
        for number in (1, 2):
            server = ServerProcess(backend := MemoryBackend(), settings(port=port))
            serving = asyncio.create_task(server.run())
            await server.ready.wait()
            if number == 1:
                await stack.enter_async_context(working(worker))
            await eventually(lambda: len(messages()) == number and worker.ready)  # noqa: B023 - called in this pass
            assert (await backend.control.settings("sleep")).timeout == (30 if asked else None)
            server.stop()
            await serving
    shown = "changed: sleep: retry, timeout" if asked else "'taskqueue apply shop.tasks:tasks'"
    assert all(shown in each for each in messages())


class RateLimited(Exception):
    """An error of a service, after which it wants a pause."""

    retry_after = 0.01


class BadAddress(Exception):
    """An error after which no attempt can succeed."""


async def test_the_program_of_the_design(world: OpenWorld) -> None:
    """U3, U4, U5: policies and rules of one task hold on each store: retries, timeout, limits, rules for exceptions."""
    tasks, runs = Tasks(), Counter[str]()
    limits = QueueLimits(rate="100/1m", max_inflight=20, order="fair", tenant_max_inflight=5)

    @tasks.task(
        retry=RetryPolicy(max_attempts=2, delays=(0.01,)),
        timeout=0.2,
        limits=limits,
        on_error={
            RateLimited: lambda error, _: Snooze(error.retry_after),
            BadAddress: Reject("bad_address"),
        },
    )
    async def send_mail(to: str) -> str:
        runs[to] += 1
        if to == "limited" and runs[to] < 4:
            raise RateLimited
        if to == "bad":
            raise BadAddress
        if to == "slow":
            await asyncio.sleep(60)
        return to

    async with world() as it, connect(it.backend) as queue, tasks.connect(queue):
        assert len((await tasks.apply()).changed) == 6
        kept = await control_of(it.backend).settings("send_mail")
        assert (kept.timeout, kept.rate_limit) == (0.2, RateLimit.parse("100/1m"))
        assert set(kept.owners.values()) == {Owner.DECLARED}
        async with working(it.worker(tasks)):
            names = ("limited", "bad", "slow")
            handles = [await send_mail.publish(to) for to in names]
            assert await handles[0].result(20) == "limited"
            for handle, reason in zip(
                handles[1:], ("bad_address", "max_retries_exceeded"), strict=True
            ):
                with pytest.raises(TaskDead) as dead:
                    await handle.result(20)
                assert dead.value.reason == reason
        assert runs == {"limited": 4, "bad": 1, "slow": 2}

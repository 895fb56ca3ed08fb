"""Tests that a dispatcher with a backlog receives the next jobs while it exchanges the slots of ended ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import SlotLease
from taskqueue_core.errors import BackendUnavailable
from taskqueue_dispatch.gpu_server.simulator import SimulatedGpu
from taskqueue_dispatch.service import Dispatcher
from tests.dispatch.patience import until
from tests.dispatch.support import dispatching, ended, ledger_of, send, serve

JOBS = 12


class Seen:
    """Counts a dispatcher's receives and slot exchanges.

    Subclasses override `answer` to replace the pool's response.
    """

    def __init__(self, dispatcher: Dispatcher, patch: pytest.MonkeyPatch) -> None:
        """Start to intercept the dispatcher's calls."""
        self.receives = 0
        self.exchanges = 0
        self.pool: Any = dispatcher.pool
        self.really = self.pool.acquire
        runner, _ = dispatcher._runners["flux"]
        self._receive = runner._subscription.receive
        patch.setattr(runner._subscription, "receive", self._receiving)
        patch.setattr(self.pool, "acquire", self._acquiring)

    async def _receiving(self, limit: int, timeout: float) -> Any:
        self.receives += 1
        return await self._receive(limit, timeout)

    async def _acquiring(self, *words: Any, releasing: Sequence[SlotLease], **named: Any) -> Any:
        if not releasing:
            return await self.really(*words, releasing=releasing, **named)
        self.exchanges += 1
        return await self.answer(*words, releasing=releasing, **named)

    async def answer(self, *words: Any, **named: Any) -> Any:
        """Exchange slots as the real pool does."""
        return await self.really(*words, **named)


async def one_slot(
    dispatcher: Dispatcher, gpu: SimulatedGpu, seen: type[Seen]
) -> tuple[Seen, list[str]]:
    """Serve one slot, run a backlog of jobs on it, and return the observer and the jobs' ids."""
    with pytest.MonkeyPatch.context() as patch:
        await serve(dispatcher, "flux", gpu)
        await until(lambda: "flux" in dispatcher.running)
        on = seen(dispatcher, patch)
        ids = await send(dispatcher, "flux", JOBS)
        await ended(dispatcher, ids)
    return on, ids


async def test_one_while_the_other(backend: Backend) -> None:
    """The next job is received while the exchange of the slot is still in progress (C19)."""
    held: list[int] = []

    class Together(Seen):
        async def answer(self, *words: Any, **named: Any) -> Any:
            # the dispatcher knows by then that there is a backlog
            if self.exchanges in range(3, 6):
                before = self.receives
                await until(lambda: self.receives > before)
                view = await self.pool.inspect("flux")
                held.append(view.endpoints[0].held)
            return await super().answer(*words, **named)

    async with (
        SimulatedGpu(name="a", slots=1, latency=0.01) as gpu,
        dispatching(backend) as dispatcher,
    ):
        _, ids = await one_slot(dispatcher, gpu, Together)
        assert list(gpu.runs) == ids
        assert set(gpu.runs.values()) == {1}
        assert held == [1, 1, 1]


async def test_the_slot_goes_to_another(backend: Backend) -> None:
    """A job may be received for a slot that another dispatcher then gets.

    It returns to the head of the queue, as the same attempt (FIX-C3).
    """

    class Taken(Seen):
        async def answer(self, *words: Any, **named: Any) -> Any:
            if self.exchanges % 3:
                return await super().answer(*words, **named)
            await self.pool.release(*named["releasing"])
            return ()

    async with (
        SimulatedGpu(name="a", slots=1, latency=0.01) as gpu,
        dispatching(backend, safety_pass=0.1) as dispatcher,
    ):
        on, ids = await one_slot(dispatcher, gpu, Taken)
        assert on.exchanges >= 3
        assert list(gpu.runs) == ids
        assert set(gpu.runs.values()) == {1}
        for job_id in ids:
            status = await dispatcher.jobs.status(job_id)
            assert status is not None
            assert status.attempt == 1


@pytest.mark.parametrize("after", [False, True], ids=["not done", "done unseen"])
async def test_the_pool_fails(backend: Backend, *, after: bool) -> None:
    """If an exchange of slots fails at any time, each job runs once and no slot is lost (C20, R16)."""

    class Broken(Seen):
        async def answer(self, *words: Any, **named: Any) -> Any:
            fails = self.exchanges in {3, 6}
            if fails and not after:
                raise BackendUnavailable("out of reach")
            told = await super().answer(*words, **named)
            if fails:
                raise BackendUnavailable("out of reach")
            return told

    async with (
        SimulatedGpu(name="a", slots=1, latency=0.01) as gpu,
        dispatching(backend, lease=0.5, safety_pass=0.1) as dispatcher,
    ):
        _, ids = await one_slot(dispatcher, gpu, Broken)
        assert sorted(gpu.runs) == sorted(ids)
        assert set(gpu.runs.values()) == {1}
    ledger = await ledger_of(backend, "flux")
    assert ledger.balanced
    assert ledger.done == JOBS

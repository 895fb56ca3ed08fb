"""Metrics while the store is unavailable, slow or broken."""

from __future__ import annotations

import asyncio

import pytest

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.tasks import Ledger, QueueStats
from taskqueue_memory import MemoryBackend
from taskqueue_server.metrics import store_metrics
from tests.server.support import eventually, http, running
from tests.server.test_metrics import scrape

pytestmark = pytest.mark.fast_clock


class Stuck(MemoryBackend):
    """A memory backend whose list of queues can be delayed, fail or never arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0
        self.error: Exception | None = None
        self.answer = asyncio.Event()
        self.answer.set()
        self._queues = self.control.queues
        self.control.queues = self._ask  # type: ignore[method-assign]

    async def _ask(self) -> tuple[str, ...]:
        self.passes += 1
        await self.answer.wait()
        if self.error is not None:
            raise self.error
        return await self._queues()


class TestOutage:
    """A scrape never fails and never hangs."""

    @pytest.mark.parametrize("error", [BackendUnavailable("away"), RuntimeError("broken")])
    async def test_a_store_that_is_away(self, error: Exception) -> None:
        """Fault K1: if the store fails, a scrape still returns the metrics of the process, and ``store_up`` is 0."""
        backend = Stuck()
        async with running(backend) as it, http(it) as client:
            await it.publish("a")
            backend.error = error
            seen = await scrape(client)
            assert seen("store_up") == 0
            assert not seen.has("queue_tasks")
            assert seen("connections", state="welcome") == 0
            backend.error = None

            async def back() -> bool:
                return (await scrape(client))("store_up") == 1

            await eventually(back)

    async def test_a_store_that_is_silent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """If the store hangs, a scrape gets the last statistics after a short wait, until they are too old.

        Only one read of the statistics is in progress at a time.
        """
        backend = Stuck()
        async with running(backend) as it, http(it) as client:
            figures = store_metrics.StoreMetrics(it.context.control, it.backend.now, patience=0.05)
            await it.publish("a")
            assert (await figures.latest()) is not None
            monkeypatch.setattr(store_metrics, "_FRESH_SECONDS", 0.0)
            backend.answer.clear()
            before = backend.passes
            told = await asyncio.gather(*(figures.latest() for _ in range(20)))
            assert all(one is told[0] and one is not None for one in told)
            assert backend.passes == before + 1
            monkeypatch.setattr(store_metrics, "_MAX_AGE_SECONDS", 0.0)
            assert await figures.latest() is None
            await figures.close()
            monkeypatch.undo()
            backend.answer.set()
            assert (await scrape(client))("store_up") == 1

    async def test_many_scrapers_cost_one_pass(self) -> None:
        """Scrapes within one second share one read of the statistics."""
        backend = Stuck()
        async with running(backend) as it, http(it) as client:
            before = backend.passes
            await asyncio.gather(*(scrape(client) for _ in range(10)))
            assert backend.passes == before + 1

    async def test_settings_that_do_not_come(self) -> None:
        """If the store does not return the settings of a queue, only the metrics about its limits are missing."""

        class Control:
            async def settings(self, key: str) -> QueueSettings:
                raise BackendUnavailable(key)

        figures = store_metrics.StoreStatistics(0, 0, (QueueStats(key="k", ledger=Ledger()),), {})
        store = store_metrics.StoreMetrics(Control(), lambda: 0.0)  # type: ignore[arg-type]
        await store.complete(figures, ["k"])
        shown = store_metrics.VisibleStatistics.of(figures, lambda _: True)
        names = {
            sample.name
            for family in store_metrics.families(figures, shown)
            for sample in family.samples
        }
        assert "taskqueue_queue_tasks" in names
        assert "taskqueue_queue_paused" not in names

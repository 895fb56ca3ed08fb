"""Pages of a store with more queues than a page lists: what is read for them."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import pytest

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.concurrency import wait_forever
from taskqueue_core.tasks import Ledger, QueueStats
from taskqueue_server.context.statistics import AT_ONCE, StatisticsReader
from taskqueue_server.dashboard import StatsPoller
from tests.dashboard.support import post
from tests.dashboard.test_live import stream
from tests.server.support import Running, running

MANY = 250
KEYS = [f"k{n:03}" for n in range(MANY)]


async def _fill(it: Running) -> None:
    for key in KEYS:
        await it.publish("one", key=key)


def _reads(it: Running, *names: str) -> Counter[str]:
    """Count the queues that are read from now on."""
    control: Any = it.context.control
    read = Counter[str]()

    def counted(inner: Callable[[str], Awaitable[Any]]) -> Callable[[str], Awaitable[Any]]:
        def call(key: str) -> Awaitable[Any]:
            read[key] += 1
            return inner(key)

        return call

    for name in names:
        setattr(control, name, counted(getattr(control, name)))
    return read


def _rows(page: str) -> list[str]:
    return re.findall(r'<tr data-queue="([^"]+)"', page)


async def test_the_first_page(
    it: Running, client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U20: while no page is open, the overview shows the server's last read of many queues, and reads its rows only."""
    monkeypatch.setattr(StatsPoller, "_run", lambda _: wait_forever())
    await _fill(it)
    await it.context.statistics.read()
    await it.publish("two", key=KEYS[0])
    await it.publish("one", key="k000a")
    await it.context.control.purge(KEYS[1])
    await it.context.control.delete(KEYS[1])
    read = _reads(it, "stats", "settings")
    page = (await client.get("/")).text
    rows = _rows(page)
    assert rows == [KEYS[0], "k000a", *KEYS[2:100]]
    assert f'<span class="tally">{MANY}</span>' in page
    assert f'<span data-live="ledger.waiting">{MANY + 1}</span>' in page
    assert f'<span data-live="q.{KEYS[0]}.waiting">2</span>' in page
    assert set(read) == set(rows)
    read.clear()
    await post(client, f"/queues/{KEYS[7]}/pause", what="deliveries", to="paused", back="overview")
    assert "Paused" in (await client.get("/")).text
    assert set(read) == set(rows)
    read.clear()
    assert _rows((await client.get("/?page=3&sort=waiting")).text) == KEYS[200:]
    assert set(read) == {*KEYS[200:], "k000a"}
    read.clear()
    assert (await client.get(f"/queues/{KEYS[9]}")).status_code == 200
    assert (await client.get("/workers")).status_code == 200
    assert set(read) == {KEYS[9], "k000a"}


async def test_samples_have_the_settings_of_open_pages() -> None:
    """U20: samples of many queues have the settings of those that open pages show, and of no others."""
    async with running() as it:
        await _fill(it)
        for key in KEYS[248:]:
            await it.context.control.configure(key, QueueSettings(paused=True))
        read = _reads(it, "settings")
        async with stream(it, "overview&page=3") as events:
            first = await anext(events)
            assert first["texts"][f"q.{KEYS[249]}.state"] == "Paused"
            names = [name.split(".")[1] for name in first["texts"] if name.startswith("q.")]
            assert set(names) == set(KEYS[200:])
            await it.context.control.configure(KEYS[249], QueueSettings(version=1))
            async for event in events:
                if event["texts"].get(f"q.{KEYS[249]}.state") == "No consumer":
                    break
        assert set(read) == set(KEYS[200:])


async def test_a_read_has_pauses() -> None:
    """C5: a read of many queues reads some at once, and lets the server do other work in between."""
    now, most = 0, 0

    class Control:
        async def queues(self) -> tuple[str, ...]:
            return tuple(KEYS)

        async def stats(self, key: str) -> QueueStats:
            nonlocal now, most
            now, most = now + 1, max(most, now + 1)
            await asyncio.sleep(0.01)
            now -= 1
            return QueueStats(key=key, ledger=Ledger())

    reader = StatisticsReader(Control(), lambda: 1.0)  # type: ignore[arg-type]
    read = await reader.read(at_once=True)
    assert (list(read.queues), read.paused, most) == (KEYS, 0.0, AT_ONCE)
    assert reader.recent(5) is read
    assert (await reader.read()).paused > 0.02

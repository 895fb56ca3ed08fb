"""The page of a worker: what it runs and ran in all queues."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import httpx2
import pytest

from taskqueue_core.capabilities import QueueSettings
from taskqueue_server.dashboard import worker
from tests.server.support import Running

PAGE = "/workers/w3"


def rows(page: str) -> list[str]:
    """Return the ids of the tasks on a page."""
    return re.findall(r'<tr data-task="([^"]+)"', page)


async def run(it: Running, key: str, task_id: str, name: str = "w3", *, dies: bool = False) -> None:
    """Let a worker end one task of a queue."""
    await it.publish(task_id, key=key)
    async with it.backend.subscribe([key], name) as subscription:
        (delivery,) = (await subscription.receive(1, 1)).deliveries
        if dies:
            await subscription.dead_letter(delivery, reason="no", error="it broke")  # type: ignore[attr-defined]
        else:
            await subscription.ack(delivery)


async def test_what_ran_in_all_queues(it: Running, client: httpx2.AsyncClient) -> None:
    """U18, U20: one page has what a worker runs and ran in all queues, the newest first, and leads to each whole list.

    The worker serves c now, and served a, b and d before.
    """
    for key in ("a", "b", "c"):
        await it.context.control.configure(key, QueueSettings(keep_ended=3600))
    await run(it, "a", "a1")
    await run(it, "b", "b1", dies=True)
    await run(it, "a", "other", "w4")
    await run(it, "b", "b2")
    await run(it, "d", "d1")
    await it.publish("c1", key="c")
    async with it.backend.subscribe(["c"], "w3") as subscription:
        await subscription.receive(1, 1)
        page = (await client.get(PAGE)).text
        assert rows(page) == ["c1", "b2", "b1", "a1"]
        assert re.findall(r"<td>(in flight|done|dead)</td>", page) == ["in flight", "done", "dead", "done"]  # fmt: skip
        assert "it broke" in page
        assert ">Connected<" in page
        (unkept,) = re.findall(r'<p class="note" id="unkept">(.+)</p>', page)
        assert re.findall(r">([a-d])</a>", unkept) == ["d"]
        lists = re.findall(r'<a href="(/queues/[abc]/tasks\?[^"]+)">([0-9]+)<', page)
        assert sorted(number for _, number in lists) == ["0"] * 5 + ["1"] * 4
        for where, number in lists:
            found = (await client.get(where.replace("&amp;", "&"))).text
            assert len(rows(found)) == int(number), where
        for elsewhere in ("/workers", "/queues/c", "/queues/c/tasks?state=in_flight"):
            assert f'<a href="{PAGE}">w3</a>' in (await client.get(elsewhere)).text, elsewhere
        (since,) = re.findall(r'name="since" type="datetime-local" step="1" value="([^"]+)"', page)
        ago = it.backend.now() - datetime.fromisoformat(since).replace(tzinfo=UTC).timestamp()
        assert 895 < ago < 930
        assert rows((await client.get(f"{PAGE}?since=-2h&until={since}")).text) == []
        later = f"{PAGE}?since={since}&until=2100-01-01T00:00:00"
        assert rows((await client.get(later)).text) == rows(page)
    assert f'<dd id="worker"><a href="{PAGE}">w3</a></dd>' in (await client.get("/tasks/a/a1")).text
    for query in ("since=soon", "since=1h&until=2h"):
        refused = await client.get(f"{PAGE}?{query}")
        assert (refused.status_code, 'class="error"' in refused.text) == (422, True), query


async def test_what_is_left_out(
    it: Running, client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U20: the page says how many queues and tasks it leaves out; the queues that the worker serves are read first."""
    monkeypatch.setattr(worker, "_QUEUES", 1)
    monkeypatch.setattr(worker, "_SHOWN", 2)
    for key in ("a", "b"):
        await it.context.control.configure(key, QueueSettings(keep_ended=3600))
    await run(it, "a", "a1")
    for number in range(3):
        await run(it, "b", f"b{number}")
    page = (await client.get(PAGE)).text
    assert (rows(page), ">Not connected<" in page) == (["a1"], True)
    assert "Only 1 of 2 queues were read, in the order of their names" in page
    async with it.backend.subscribe(["b"], "w3"):
        page = (await client.get(PAGE)).text
    assert rows(page) == ["b2", "b1"]
    assert "Only 1 of 2 queues were read, those of this worker first" in page
    assert ">2+<" in page.replace('<span class="hidden"> done: b</span>', "<")


async def test_earlier_ones(
    it: Running, client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U20: what is found but not shown is on the next page, which ends where this one did."""
    monkeypatch.setattr(worker, "_SHOWN", 2)
    for key in ("a", "b"):
        await it.context.control.configure(key, QueueSettings(keep_ended=3600))
    await run(it, "a", "a1")
    await run(it, "b", "b1")
    await run(it, "b", "b2")
    page = (await client.get(f"{PAGE}?since=-1h")).text
    assert rows(page) == ["b2", "b1"]
    (following,) = re.findall(r'href="(\?[^"]+)" rel="next"', page)
    assert re.fullmatch(r"\?since=[^&]+&amp;until=[^&]+", following)
    assert rows((await client.get(PAGE + following.replace("&amp;", "&"))).text)

"""Lists of tasks on the dashboard, actions on several of them, and the page of a task."""

from __future__ import annotations

import re

import httpx2
import pytest

from taskqueue_core.backend import Capabilities, Capability
from taskqueue_core.capabilities import Order, QueueSettings
from taskqueue_core.rate_limit import IntervalUnit, RateLimit
from taskqueue_core.tasks import QueueStats, State, Task
from taskqueue_memory import MemoryBackend
from taskqueue_server.dashboard import tenants
from tests.dashboard.support import post
from tests.dashboard.test_forms import bury, followed
from tests.server.support import Running

LIST = "/queues/k/tasks"


def rows(page: str) -> list[str]:
    """Return the ids of the tasks on a page."""
    return re.findall(r'<tr data-task="([^"]+)"', page)


async def test_each_number_leads_to_its_list(it: Running, client: httpx2.AsyncClient) -> None:
    """U20: the numbers of the overview, and all parts of a queue's ledger, are links to the tasks that they count."""
    await bury(it, "dead")
    await it.publish("one", "two", tenant="acme")
    overview, queue = (await client.get("/")).text, (await client.get("/queues/k")).text
    for state in State:
        where = f"{LIST}?state={state.value}"
        assert f'href="{where}"' in queue
        page = await client.get(where)
        assert page.status_code == 200
        count = await it.count(state)
        assert len(rows(page.text)) == count, state
    for name in ("waiting", "blocked", "scheduled", "in_flight"):
        assert f'href="{LIST}?state={name}"' in overview
    (first, *_) = re.findall(r'<a href="(/tasks/k/[^"]+)"', (await client.get(LIST)).text)
    assert (await client.get(first)).status_code == 200


async def test_pages_and_filters(it: Running, client: httpx2.AsyncClient) -> None:
    """U18, U20: a list has pages in both orders, and filters by tenant and tag; what is refused is explained."""
    await it.context.control.configure("k", QueueSettings(index=("user",)))
    tasks = [
        Task(key="k", id=f"t{n:02}", tenant="ab"[n % 2], tags=(f"user:{n % 3}",)) for n in range(60)
    ]
    await it.backend.publisher.publish(*tasks)
    for order in ("", "&newest=true"):
        address, seen = f"{LIST}?state=waiting{order}", list[str]()
        while address:
            page = (await client.get(address)).text
            seen += rows(page)
            following = re.search(r'href="(\?[^"]+)" rel="next"', page)
            address = LIST + following[1].replace("&amp;", "&") if following else ""
        assert seen == sorted([task.id for task in tasks], reverse=bool(order))
    tagged = (await client.get(f"{LIST}?tag=user:1&tenant=a")).text
    assert rows(tagged) == [f"t{n:02}" for n in range(60) if n % 3 == 1 and n % 2 == 0]
    for query, words in (
        ("tag=job:1", "taskqueue queue set k --index NAME"),
        ("state=nothing", "state: got"),
        ("state=waiting&after=x", "after: got"),
    ):
        refused = await client.get(f"{LIST}?{query}")
        assert (refused.status_code, words in refused.text) == (422, True), query


async def test_what_a_worker_ran_at_a_time(it: Running, client: httpx2.AsyncClient) -> None:
    """U18, U20: tasks that ended, or died, are shown by worker and time; a relative time is the same on all pages."""
    await it.context.control.configure("k", QueueSettings(keep_ended=3600))
    ids = [f"t{n:02}" for n in range(60)]
    await bury(it, "dead")
    await it.publish(*ids)
    async with it.backend.subscribe(["k"], "w3") as subscription:
        for delivery in (await subscription.receive(60, 1)).deliveries:
            await subscription.ack(delivery)
    first = (await client.get(f"{LIST}?state=done&worker=w3&since=-1h")).text
    (following,) = re.findall(r'href="(\?[^"]+)" rel="next"', first)
    second = (await client.get(LIST + following.replace("&amp;", "&"))).text
    assert rows(first) + rows(second) == ids
    (since,) = re.findall(r'name="since" type="datetime-local" step="1" value="([^"]+)"', first)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", since)
    heads = re.findall(r"<th scope=\"col\"[^>]*>([A-Z][a-z]+)</th>", first)
    assert heads == ["Task", "Attempt", "Ago", "Started", "Ended", "Worker"]
    assert 'UTC</td><td><a href="/workers/w3">w3</a></td>' in re.sub(r"\n *", "", first)
    for query, shown in (
        ("state=done&worker=w4", 0),
        ("state=done&until=-1h", 0),
        (f"state=dead&worker=worker-1&since={since}", 1),
        ("state=dead&worker=w3", 0),
        # The next list has no times, and its form has no fields for them.
        ("state=waiting&since=-1h", 0),
    ):
        page = await client.get(f"{LIST}?{query}")
        assert (page.status_code, len(rows(page.text))) == (200, shown), query
    for query in ("since=soon", "since=9999-12-31T23:59-14:00", "since=1h&until=2h"):
        refused = await client.get(f"{LIST}?state=done&{query}")
        assert (refused.status_code, 'class="error"' in refused.text) == (422, True), query
    form = {"action": "discard", "state": "dead", "what": "all"}
    nothing = await post(client, LIST, **form, until=since)
    assert "no task was selected" in await followed(client, nothing)
    preview = (await post(client, LIST, **form, since=since)).text
    assert f'name="since" value="{since}"' in preview


async def test_actions_are_previewed(it: Running, client: httpx2.AsyncClient) -> None:
    """U20, U21: an action on several tasks says how many it changes, changes these once confirmed, and is recorded."""
    ids = [f"t{n}" for n in range(4)]
    await it.publish(*ids, tenant="acme")
    await it.publish("other")
    chosen = {"action": "cancel", "state": "waiting", "tenant": "acme"}
    preview = await post(client, LIST, **chosen, what="all")
    assert '<span id="touched">4</span>' in preview.text
    assert await it.count(State.CANCELLED) == 0
    shown = re.findall(r'name="ids" value="([^"]+)"', preview.text)
    assert shown == ids
    await it.context.control.cancel("k", "t0")
    answer = await client.post(LIST, data={**chosen, "ids": shown, "confirm": "cancel"})
    assert "Cancelled: 3." in await followed(client, answer)
    (entry,) = await it.backend.audit.entries(limit=1)  # type: ignore[attr-defined]
    assert (entry.action, entry.key, entry.tasks) == ("cancel", "k", 3)
    assert entry.details == "state=waiting&tenant=acme ids: t0 t1 t2 t3"
    nothing = await post(client, LIST, action="cancel", state="waiting")
    assert "no task was selected" in await followed(client, nothing)
    assert await it.count(State.WAITING) == 1


@pytest.mark.parametrize(
    ("action", "state", "after"),
    [
        ("run", State.SCHEDULED, State.WAITING),
        ("redrive", State.DEAD, State.WAITING),
        ("discard", State.DEAD, State.DISCARDED),
    ],
)
async def test_each_action(
    it: Running, client: httpx2.AsyncClient, action: str, state: State, after: State
) -> None:
    """U20: scheduled tasks run now; dead letters are redriven or discarded."""
    if state is State.DEAD:
        await bury(it, "a", "b")
    else:
        await it.publish("a", "b", not_before=it.backend.now() + 900)
    assert f'value="{action}"' in (await client.get(f"{LIST}?state={state.value}")).text
    form = {"action": action, "state": state.value, "ids": "a"}
    assert '<span id="touched">1</span>' in (await post(client, LIST, **form)).text
    assert await it.count(state) == 2
    await followed(client, await post(client, LIST, **form, confirm=action))
    await it.reaches("k", **{state.value: 1, after.value: 1})


async def test_the_tenants_of_a_queue(
    it: Running, client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U20: the table of tenants shows what waits and runs, is sorted by a column, and leads to their tasks."""
    limit = RateLimit(max_tokens=7, interval_unit=IntervalUnit.MINUTES)
    settings = QueueSettings(order=Order.FAIR, tenant_rate_limit=limit, paused_tenants=("idle",))
    await it.context.control.configure("k", settings)
    assert "No waiting or running task has a tenant" in (await client.get("/queues/other")).text
    await it.publish("a", tenant="acme")
    await it.publish("g1", "g2", tenant="globex")
    await it.publish("none")
    subscription = it.context.backend.subscribe(["k"], "w1")
    ((running,),) = [(await subscription.receive(1, 1)).deliveries]
    assert running.task.id == "a"
    page = table = ""
    for column, order in (
        ("in_flight", ["acme", "globex", "idle", "no tenant"]),
        ("waiting", ["globex", "no tenant", "acme", "idle"]),
        ("oldest", ["globex", "no tenant", "acme", "idle"]),
    ):
        page = (await client.get(f"/queues/k?tenants={column}")).text
        table = page.partition('aria-label="Tenants">')[2].partition("</table>")[0]
        rows = re.findall(r'<th scope="row" class="name">(?:<a href="[^"]+">)?([^<]+)', table)
        assert rows == order, column
    assert "At most 7 per minute each." in page
    assert f'href="{LIST}?tenant=globex&amp;state=waiting">2<' in table
    assert table.count(">Paused<") == 1
    assert "of the first" not in page
    monkeypatch.setattr(tenants, "READ", 2)
    assert "of the first" in (await client.get("/queues/k?tenants=x")).text
    await subscription.ack(running)
    page = (await client.get("/queues/k?tenants=run_time")).text
    assert re.findall(r'state=in_flight">0<[^\n]+?<td class="n">[0-9.]+ m?s<', page)


async def test_the_slow_tenant(it: Running, client: httpx2.AsyncClient) -> None:
    """U20: run times of tenants are known from the server's start, and of what runs, how long the oldest has run."""
    await it.publish("done", tenant="quick")
    await it.publish("s1", "s2", tenant="slow")
    subscription = it.context.backend.subscribe(["k"], "w1")
    deliveries = (await subscription.receive(3, 1)).deliveries
    await subscription.ack(deliveries[0])
    page = (await client.get("/queues/k?tenants=running")).text
    table = page.partition('aria-label="Tenants">')[2].partition("</table>")[0]
    table = table.replace("\u2013", "none")
    rows = re.findall(r'<th scope="row" class="name"><a href="[^"]+">([^<]+)', table)
    assert rows == ["slow", "quick"]
    slow, quick = (
        re.findall(r'<td class="n">([^<]+)</td>', row) for row in table.split("</th>")[-2:]
    )
    # Oldest, running for, run time, delivered, share, done, weight; the numbers of tasks are links.
    assert (slow[0], slow[2:]) == ("none", ["none", "2", "67 %", "0", "1"])
    assert (quick[:2], quick[3:]) == (["none", "none"], ["1", "33 %", "1", "1"])
    assert all(re.fullmatch(r"[0-9.]+ m?s", text) for text in (slow[1], quick[2]))
    await subscription.close()


async def test_erasure_of_a_tag(it: Running, client: httpx2.AsyncClient) -> None:
    """U20, U21: the list of a tag leads to an erasure, which says what it would erase, and erases it once confirmed."""
    await it.context.control.configure("k", QueueSettings(index=("user",)))
    await it.publish("a", "b", tags=("user:1",))
    await it.publish("other")
    assert 'value="erase"' in (await client.get(f"{LIST}?tag=user:1")).text
    assert 'value="erase"' not in (await client.get(LIST)).text
    form = {"action": "erase", "tag": "user:1"}
    preview = (await post(client, LIST, **form)).text
    assert "Erase 2 tasks with the tag user:1" in preview
    assert "2 waiting" in preview
    assert await it.count(State.WAITING) == 3
    page = await followed(client, await post(client, LIST, **form, confirm="erase"))
    assert "Erased: 2." in page
    assert (await it.count(State.WAITING), await it.count(State.CANCELLED)) == (1, 2)
    entries = await it.backend.audit.entries(limit=3)  # type: ignore[attr-defined]
    assert [(entry.action, entry.tasks, entry.details) for entry in entries] == [
        ("erase", 2, "tag=user:1"),
        ("begin to erase", None, "tag=user:1"),
    ]
    refused = await post(client, LIST, action="erase", tag="shop:1", confirm="erase")
    assert refused.status_code == 422
    assert len(await it.backend.audit.entries(limit=3)) == 2  # type: ignore[attr-defined]


async def test_an_action_is_bounded(it: Running, client: httpx2.AsyncClient) -> None:
    """U20: one action changes at most 1,000 tasks, and its preview says that more follow."""
    await it.backend.publisher.publish(*(Task(key="k") for _ in range(1000)))
    await it.publish("last")
    preview = await post(client, LIST, action="cancel", state="waiting", what="all")
    assert '<span id="touched">1,000</span>' in preview.text
    assert "more follow" in preview.text
    ids = re.findall(r'name="ids" value="([^"]+)"', preview.text)
    await client.post(LIST, data={"action": "cancel", "confirm": "cancel", "ids": ids})
    assert await it.count(State.WAITING) == 1


async def test_the_life_of_a_task(it: Running, client: httpx2.AsyncClient) -> None:
    """U20: the page of a task has its fields, its attempts with worker and traceback, and the times between states."""
    await it.publish("t", tenant="acme", tags=("user:1",), payload=b'{"to": "ada"}')
    async with it.backend.subscribe(["k"], "w1") as subscription:
        (delivery,) = (await subscription.receive(1, 1)).deliveries
        publisher = it.backend.publisher
        at = it.backend.now() + 900
        await publisher.schedule_retry(
            delivery.task, at, error="TimeoutError", traceback="line 7", settles=delivery
        )
        page = (await client.get("/tasks/k/t")).text
        for words in ("acme", "user:1", "w1", "line 7", "ada", "Attempt 1 failed", "Retry now"):
            assert words in page, words
        answer = await post(client, "/tasks/k/t", action="run")
        assert "Available now: 1." in await followed(client, answer)
        (delivery,) = (await subscription.receive(1, 1)).deliveries
        await subscription.ack(delivery, results=[b'"the result"'])
    done = (await client.get("/tasks/k/t")).text
    assert "the result" in done
    assert "ada" not in done
    assert re.search(r"<b>Done</b>", done)


async def test_without_the_capability(
    it: Running, client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U20: with a backend that has no lists, the page says so, and the page of a task has what the status has."""
    await bury(it, "dead")
    names = MemoryBackend.capabilities.names - {Capability.LISTING}
    monkeypatch.setattr(MemoryBackend, "capabilities", Capabilities(names=names, shared=False))
    assert "no lists of tasks" in (await client.get(LIST)).text
    assert "it broke" in (await client.get("/tasks/k/dead")).text


async def test_pages_with_many_queues(it: Running, client: httpx2.AsyncClient) -> None:
    """U20: with 250 queues, a page reads one queue again, not all of them; after an action, the overview is current."""
    for n in range(250):
        await it.publish("one", key=f"k{n:03}")
    await client.get("/")
    control, read = it.context.control, list[str]()
    stats = control.stats

    async def counted(key: str) -> QueueStats:
        read.append(key)
        return await stats(key)

    it.context.control.stats = counted  # type: ignore[method-assign]
    await it.publish("two", key="k007")
    page = (await client.get("/queues/k007")).text
    assert '<span data-live="ledger.waiting">2</span>' in page
    await client.get("/tasks/k007/two")
    await client.get("/")
    assert read.count("k200") <= 1  # the poller's own sample may have come in between
    assert read.count("k007") >= 2
    await post(client, "/queues/k003/pause", what="deliveries", to="paused", back="overview")
    assert "Paused" in (await client.get("/")).text

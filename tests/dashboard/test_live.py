"""Live updates of the dashboard: one poller, a limited number of event streams, and a quick shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx2
import msgspec
import pytest

from taskqueue_core.capabilities import QueueSettings, control_of
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.tasks import (
    Delivery,
    Health,
    Ledger,
    QueueStats,
    Settled,
    Task,
)
from taskqueue_server.context.waiters import LimitedSlots
from taskqueue_server.dashboard import StatsPoller, poller
from taskqueue_server.dashboard.formatting import sparkline, state_of
from taskqueue_server.dashboard.local_metrics import RECENT, ProcessGauges, TenantFlows
from taskqueue_server.dashboard.snapshot import (
    HISTORY,
    History,
    MetricsWindow,
    Snapshot,
    StoreReading,
)
from taskqueue_server.problems import ProblemError
from tests.dashboard.support import PAGE
from tests.server.support import Running, eventually, http, running

pytestmark = pytest.mark.fast_clock


@asynccontextmanager
async def stream(
    it: Running, view: str = "overview"
) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """Open an event stream and yield its events."""
    async with http(it) as client, client.stream("GET", f"/live?view={view}") as answer:
        assert answer.status_code == 200, answer.status_code
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield _told(answer)


async def _told(answer: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
    name = ""
    async for line in answer.aiter_lines():
        kind, _, value = line.partition(": ")
        if kind == "event":
            name = value
        elif kind == "data":
            yield {"event": name, **msgspec.json.decode(value)}


async def test_only_what_changed() -> None:
    """C17: the first event contains all values and the history; later events contain only what has changed."""
    async with running() as it:
        await it.publish("one")
        async with stream(it) as events:
            first = await anext(events)
            assert first["event"] == "sample"
            assert first["ledger"]["published"] == 1
            assert first["texts"]["q.k.waiting"] == "1"
            await it.publish("two", "three")
            second = await anext(events)
            assert second["sample"] == first["sample"] + 1
            assert second["texts"]["q.k.waiting"] == "3"
            assert "ledger.dead" not in second["texts"]
            assert len(second["rows"]) == 1
            assert second["ledger"] == msgspec.structs.asdict(await it.ledger())


async def test_without_an_open_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is polled, and the metrics plugin is active, only while a page is open."""
    monkeypatch.setattr(poller, "_LINGER_SECONDS", 0.1)
    async with running() as it:
        one = StatsPoller.of(it.context)
        assert one.latest is None
        before = len(it.context.hooks.plugins)
        async with stream(it) as events:
            await anext(events)
            assert len(it.context.hooks.plugins) == before + 1
        await eventually(lambda: len(it.context.hooks.plugins) == before)
        assert len(one.room) == 0


async def test_one_token_leaves_pages_to_others() -> None:
    """Security 22: one identity may use at most half of the places for open pages."""
    room = LimitedSlots(4, "too_many_pages", "dashboard pages are open")
    with room.acquire("a"), room.acquire("a"):
        with pytest.raises(ProblemError) as refused, room.acquire("a"):
            pass
        assert refused.value.problem.status == 429
        with (
            room.acquire("b"),
            room.acquire(None),
            pytest.raises(ProblemError) as full,
            room.acquire("c"),
        ):
            pass
        assert full.value.problem.status == 503
    assert len(room) == 0
    with room.acquire(None), room.acquire(None), room.acquire(None), room.acquire(None):
        assert len(room) == 4


async def test_so_many_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Security 12: when too many pages are open, another stream gets 503 with Retry-After.

    A closed page frees its place.
    """
    monkeypatch.setattr(poller, "MAX_STREAMS", 3)
    async with running() as it, http(it, headers=PAGE) as client:
        async with AsyncExitStack() as stack:
            pages = [await stack.enter_async_context(stream(it)) for _ in range(3)]
            for events in pages:
                await anext(events)
            async with asyncio.timeout(5):
                refused = await client.get("/live?view=overview")
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            assert (await client.get("/")).status_code == 200
        await eventually(lambda: len(StatsPoller.of(it.context).room) == 0)
        async with stream(it) as events:
            await anext(events)
        for view in ("", "nothing", "task", "queue", "task&key=k", "workers&key=k", "queue&key=~"):
            async with asyncio.timeout(5):
                assert (await client.get(f"/live?view={view}")).status_code in {404, 422}


async def test_one_that_does_not_read() -> None:
    """Fault G4: a page that does not read its events does not delay the events of other pages."""
    async with running() as it:
        await it.publish("one")
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", int(it.server.url.rpartition(":")[2])
        )
        writer.write(b"GET /live?view=overview HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        await writer.drain()
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        async with stream(it) as events:
            numbers = [(await anext(events))["sample"] for _ in range(3)]
        assert numbers == list(range(numbers[0], numbers[0] + 3))
        writer.transport.abort()
        await eventually(lambda: len(StatsPoller.of(it.context).room) == 0)


async def test_the_end_is_not_held_up() -> None:
    """Fault K: a server with open pages stops as quickly as without, and each event stream ends with the reason."""
    last: list[dict[str, Any]] = []

    async def follow(events: AsyncIterator[dict[str, Any]], began: asyncio.Event) -> None:
        async for event in events:
            began.set()
            last.append(event)

    async with AsyncExitStack() as stack, running(drain=5.0) as it:
        followers = []
        for _ in range(3):
            events = await stack.enter_async_context(stream(it))
            began = asyncio.Event()
            followers.append(asyncio.create_task(follow(events, began)))
            await began.wait()
        start = asyncio.get_running_loop().time()
        it.server.stop()
        assert it.ended is not None
        await it.ended
        assert asyncio.get_running_loop().time() - start < 1.5
        await asyncio.gather(*followers)
        await stack.aclose()
    assert [event for event in last if event["event"] == "bye"] == [
        {"event": "bye", "reason": "ending"}
    ] * 3


async def test_the_store_is_away() -> None:
    """C17: during an outage pages say that the store does not respond and keep the last values.

    Afterwards they recover.
    """
    async with running() as it, http(it, headers=PAGE) as client:
        await it.publish("one")
        async with stream(it) as events:
            assert (await anext(events))["texts"]["@store"] == "ok"
            queues = it.context.control.queues
            away = _raising()
            it.context.control.queues = away  # type: ignore[method-assign]
            event = await _until(events, "store", "does not respond (backend_unavailable)")
            assert event["ledger"]["published"] == 1
            page = await client.get("/")
            assert page.status_code == 503
            assert "does not respond" in page.text
            it.context.control.queues = queues  # type: ignore[method-assign]
            await _until(events, "store", "responds")
        assert (await client.get("/")).status_code == 200


def _raising() -> Any:
    async def away() -> tuple[str, ...]:
        raise BackendUnavailable("gone")

    return away


async def _until(events: AsyncIterator[dict[str, Any]], name: str, text: str) -> dict[str, Any]:
    async with asyncio.timeout(5):
        async for event in events:
            if event["texts"].get(name) == text:
                return event
    raise AssertionError(name)


async def test_unbalanced_books_are_seen() -> None:
    """Law 1: if a ledger does not balance, the page shows it as a text and as a state."""
    async with running() as it, http(it, headers=PAGE) as client:
        await it.publish("one")
        control = it.context.control
        stats = await control.stats("k")
        wrong = msgspec.structs.replace(stats, ledger=Ledger(published=3, done=1))

        async def lying(key: str) -> QueueStats:
            return msgspec.structs.replace(wrong, key=key)

        control.stats = lying  # type: ignore[method-assign]
        page = (await client.get("/")).text
        assert 'data-live="balance" data-state="bad">Ledger does not balance: 2 missing' in page


def _sample(number: int, **ledgers: Ledger) -> Snapshot:
    readings = {
        key: StoreReading(QueueStats(key=key, ledger=ledger), QueueSettings())
        for key, ledger in ledgers.items()
    }
    return Snapshot(
        number=number, at=float(number), readings=readings, health=Health(ok=True, backend="m")
    )


def test_the_history_is_bounded() -> None:
    """The history keeps a limited number of samples.

    Rates use only queues that are in both samples, so that a new queue does not look like a burst.
    """
    history = History()
    for number in range(HISTORY + 50):
        history.add(_sample(number, a=Ledger(published=number * 10, done=number * 10)))
    assert len(history) == HISTORY
    assert len(list(history.rows(["a"]))) == HISTORY
    assert history.window(["a"]).published == pytest.approx(10)
    now = HISTORY + 50
    both = {
        "a": Ledger(published=now * 10, done=now * 10),
        "b": Ledger(published=1_000_000, waiting=1_000_000),
    }
    history.add(_sample(now, **both))
    assert history.window(["a", "b"]).published == pytest.approx(10)
    assert next(history.rows(["a", "b"], 1))[1] == pytest.approx(10)
    assert next(history.rows(["a", "b"], 1))[3] == 1_000_000


def test_what_was_not_measured_is_not_drawn() -> None:
    """U20: charts and sparklines break where the store was not read, and a rate is not computed across the gap."""
    history = History()
    for number in (1, 2, 3, 60, 61):
        history.add(
            _sample(number, a=Ledger(published=number, waiting=number)), after_gap=number == 60
        )
    rows = list(history.rows(["a"]))
    assert [(row[0], row[1], row[3]) for row in rows] == [
        (1, None, 1),
        (2, 1, 2),
        (3, 1, 3),
        (31.5, None, None),
        (60, None, 60),
        (61, 1, 61),
    ]
    assert [row[0] for row in history.rows(["a"], 1)] == [61]
    assert history.series("a") == [1, 2, 3, None, 60, 61]
    assert history.series("b") == [None] * 6
    assert sparkline([1, 1, 1, None, 2, 4]) == "M0,145L384,145M768,100L960,10"
    history.add(_sample(90, a=Ledger(published=500, waiting=500)), after_gap=True)
    assert history.window(["a"]).published == 0
    assert [row[0] for row in history.rows(["a"], 1)] == [75.5, 90]
    history.add(_sample(91, b=Ledger()), after_gap=True)
    history.add(_sample(92, a=Ledger(published=501, waiting=501)))
    assert [row[0] for row in history.rows(["a"])][-2:] == [91, 92]


def test_the_state_of_a_queue_is_that_of_its_tasks() -> None:
    """U20: a queue that only fails, or has only dead letters, does not say that it works."""

    def state(window: MetricsWindow, **counts: int) -> str:
        reading = _sample(1, a=Ledger(published=sum(counts.values()), **counts)).readings["a"]
        return state_of(reading, window)[1]

    quiet = MetricsWindow()
    assert state(quiet, dead=3) == "Only dead letters"
    assert state(quiet, dead=3, scheduled=1) == "Idle"
    assert state(MetricsWindow(published=2, dead=1), dead=3, in_flight=1) == "Failing"
    assert state(MetricsWindow(done=9, dead=1), dead=3) == "Working"
    assert state(quiet, done=3) == "Idle"


def test_gauges_are_bounded() -> None:
    """Security 16: a limited number of run times is kept, for a limited number of queues and tenants."""
    gauges, flows = ProcessGauges(lambda: 10.0), TenantFlows(lambda: 10.0)
    tasks = [Task(key="k0", tenant=f"t{n}") for n in range(500)]
    tasks += [Task(key="k0", tenant="t300")]
    tasks += [Task(key=f"k{n // 8}", tenant=f"t{n}") for n in range(8, 10_000)]
    deliveries = [Delivery(task=task, receipt="r", attempt=1, delivered_at=9.5) for task in tasks]
    for hooks in (gauges, flows):
        hooks.settled(deliveries, "ack", [Settled.OK] * len(deliveries))
        hooks.settled(deliveries, "redeliver", [Settled.OK] * len(deliveries))
    assert sum(len(flows.of(f"k{n}")) for n in range(1250)) == flows._count == 9992
    assert flows.of("k0") == {}  # the queue that was not seen for the longest time makes room
    for tenant in (*range(300), 0):
        task = Task(key="k9", tenant=f"t{tenant}")
        flows.delivered([Delivery(task=task, receipt="r", attempt=1, delivered_at=9.5)])
    assert list(flows.of("k9")) == [*(f"t{n}" for n in range(101, 300)), "t0"]
    flow = flows.of("k9")["t299"]
    for seconds in (9.0,) * 30 + (2.0,) * 11:
        flow.acked(seconds)
    assert (len(flow.times), flow.run_time) == (RECENT, 2.0)
    taken = gauges.take()
    assert len(taken) == 1000
    assert taken["k0"].p95 == 0.5
    assert gauges.take() == {}


async def test_who_settles_is_measured() -> None:
    """C17: the page of a queue shows run times and tenants of the tasks that workers of this server have run."""
    async with running() as it, http(it, headers=PAGE) as client:
        await client.get("/")
        await it.publish("one", tenant="acme")
        async with it.worker() as worker:
            await worker.send("credit", n=1)
            (delivery,) = await worker.deliveries(1)
            await worker.send("ack", receipts=[delivery["receipt"]])
            await worker.settled(1)
        page = (await client.get("/queues/k")).text
        assert "acme" in page
        assert " ms" in page.partition("q.k.p50")[2][:60] or "ms" in (await client.get("/")).text
        assert await control_of(it.context.backend).queues() == ("k",)

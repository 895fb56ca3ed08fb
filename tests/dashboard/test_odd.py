"""Unusual situations: many queues, many viewers, odd data, and streams whose client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack

import httpx2
import pytest

from taskqueue_core.config import Settings
from taskqueue_core.hooks import Identity
from taskqueue_core.tasks import Ledger
from taskqueue_server.dashboard import StatsPoller, pages, poller
from taskqueue_server.dashboard.snapshot import LISTED, History
from taskqueue_server.dashboard.tasks import pretty
from taskqueue_server.dashboard.views import DashboardView
from taskqueue_server.routing import event_stream
from tests.dashboard.support import ADMIN, PAGE, Gate, raw_ledger
from tests.dashboard.test_forms import bury
from tests.dashboard.test_live import _sample
from tests.dashboard.test_live import stream as following
from tests.server.support import Running, eventually, http, running

pytestmark = pytest.mark.fast_clock


async def test_pages_do_not_change_under_the_server(
    it: Running, client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages are read from disk at the start only, so that an upgrade does not mix new pages with running code."""

    def gone(*_: object) -> None:
        raise AssertionError("a page was read from disk")

    monkeypatch.setattr(pages._environment.loader, "get_source", gone)
    monkeypatch.setattr(pages._environment.loader, "load", gone)
    await it.publish("one")
    for path in ("/", "/workers", "/queues/k", "/queues/k/dead", "/tasks/k/one", "/find", "/login"):
        assert (await client.get(path)).status_code in {200, 303}
    assert (await client.get("/queues/~")).status_code == 422


@pytest.mark.parametrize(
    "odd", [b"[" * 90 + b"]" * 90, b'"\\ud83d\\ude00"', b'"' + b"x" * 100_000 + b'"', b"1e400"]
)
async def test_odd_payloads(it: Running, client: httpx2.AsyncClient, odd: bytes) -> None:
    """Security 25: no payload or error text breaks a page."""
    assert pretty(b"no json") == ("no json", 0)
    assert pretty(b"[" * 3000) == ("[" * 3000, 0)
    assert pretty(b"\xff") == ("\ufffd", 0)
    await it.publish("one", payload=odd)
    subscription = it.context.backend.subscribe(["k"], "worker-1")
    (delivery,) = (await subscription.receive(1, 1)).deliveries
    await subscription.dead_letter(delivery, reason="\ud800 half", error="\udfff\x00half")  # type: ignore[attr-defined]
    await subscription.close()
    for path in ("/", "/tasks/k/one", "/queues/k/dead", "/queues/k"):
        assert (await client.get(path)).status_code == 200, path


def test_sums_are_over_all_queues() -> None:
    """C17: charts and rates include the queues that are not listed on a page.

    A new queue does not look like a burst.
    """
    history = History()
    several = {f"q{n:03}": Ledger(published=5, waiting=5) for n in range(LISTED + 30)}
    history.add(_sample(1, **several))
    more = {name: Ledger(published=6, waiting=6) for name in several}
    history.add(_sample(2, **more, z=Ledger(published=1_000_000, waiting=1_000_000)))
    first, second = history.rows(None)
    assert first[3] == 5 * (LISTED + 30)
    assert second[1] == LISTED + 30
    assert second[3] == 6 * (LISTED + 30) + 1_000_000
    assert history.window(None).published == LISTED + 30
    assert [row[3] for row in history.rows([f"q{LISTED + 7}"])] == [5, 6]
    history.add(_sample(5000, **several))
    assert len(history) == 1


async def test_made_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault G4: an event is built once for all viewers with the same rights.

    A viewer with other rights gets a separate event.
    """
    made: list[tuple[int, object]] = []
    event = DashboardView._event

    def counted(view: DashboardView, sample: object, *rest: object) -> bytes:
        made.append((sample.number, view._same))  # type: ignore[attr-defined]
        return event(view, sample, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(DashboardView, "_event", counted)
    async with running() as it:
        only = Identity(name="a", verbs=frozenset({"admin"}), keys=("alpha",))
        it.context.hooks.register(Gate(all=ADMIN, a=only))
        await it.publish("one", key="alpha")
        await it.publish("one", "two", key="bravo")
        async with AsyncExitStack() as stack:
            followed = []
            for token in ("all", "all", "all", "a"):
                client = await stack.enter_async_context(
                    http(it, headers={"authorization": f"Bearer {token}", **PAGE})
                )
                answer = await stack.enter_async_context(
                    client.stream("GET", "/live?view=overview")
                )
                followed.append(answer.aiter_lines())
            for lines in followed:
                for _ in range(6):
                    line = await anext(lines)
                    if line.startswith("data") and lines is followed[-1]:
                        assert "bravo" not in line
            del lines
    by_sample = [one for one in made if made.count(one) > 2]
    assert not by_sample, by_sample


async def test_no_old_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """C17: after a pause without viewers, the first event contains current values."""
    monkeypatch.setattr(poller, "_LINGER_SECONDS", 0.05)
    async with running() as it:
        await it.publish("one")
        async with following(it) as events:
            assert (await anext(events))["ledger"]["published"] == 1
        await eventually(lambda: StatsPoller.of(it.context)._task is None)
        await it.publish("two")
        async with following(it) as events:
            assert (await anext(events))["ledger"]["published"] == 2


@pytest.mark.parametrize("version", ["2.3", "2.4"])
async def test_a_place_is_given_back(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Security 12, fault G4: an event stream that its client does not read ends and frees its place."""
    monkeypatch.setattr(event_stream, "_READS", 0.05)

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    async def events() -> AsyncGenerator[bytes]:
        yield b"data: 1\n\n"

    async with running() as it:
        one = StatsPoller.of(it.context)
        answer = event_stream.EventStream(one.stream(None), events())
        scope = {"type": "http", "asgi": {"spec_version": version}}
        async with asyncio.timeout(5):
            await answer(scope, never, never)  # type: ignore[arg-type]
        assert len(one.room) == 0


async def test_a_worker_is_no_dead_letter(it: Running, client: httpx2.AsyncClient) -> None:
    """The page of dead letters announces a change if its dead letters have changed, and not if a worker connects."""

    async def shape() -> str:
        return (await client.get("/queues/k/dead")).text.partition('data-shape="')[2][:12]

    await bury(it, "one", "two")
    before = await shape()
    subscription = it.context.backend.subscribe(["k"], "worker-2")
    assert await shape() == before
    await subscription.close()
    await it.context.dead_letters.redrive("k", "one")
    assert await shape() != before


@pytest.mark.parametrize("path", ["/login", "/logout"])
async def test_sessions_of_other_sites(it: Running, client: httpx2.AsyncClient, path: str) -> None:
    """Security 4: no page of another site can sign in or out, even if its origin may use the API."""
    friend = "https://friend.example"
    assert isinstance(it.context.settings, Settings)
    it.context.hooks.register(Gate(all=ADMIN))
    it.context.settings.origins |= {friend}
    for origin in (friend, "null", "https://evil.example"):
        answer = await client.post(path, data={"token": "all"}, headers={"origin": origin, **PAGE})
        assert answer.status_code == 403, origin
        assert "set-cookie" not in answer.headers
    own = await client.post(path, data={"token": "all"}, headers={"origin": it.server.url, **PAGE})
    assert own.status_code == 303
    assert "set-cookie" in own.headers


async def test_huge_numbers(it: Running, client: httpx2.AsyncClient) -> None:
    """C17: large numbers are shown in full."""
    await it.publish("one")
    stats = await it.context.control.stats("k")
    number = 9_876_543_210_123

    async def lying(key: str) -> object:
        del key
        return type(stats)(key="k", ledger=Ledger(published=number, done=number))

    it.context.control.stats = lying  # type: ignore[assignment,method-assign]
    page = (await client.get("/")).text
    assert "9,876,543,210,123" in page
    assert raw_ledger(page) == Ledger(published=number, done=number)

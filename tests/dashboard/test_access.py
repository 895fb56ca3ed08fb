"""Access to the dashboard: signing in and out, tokens for some queues only, and revoked tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx2
import pytest

from taskqueue_core import Every, Schedule, TaskTemplate, WorkflowState, WorkflowStep
from taskqueue_core.consumer.expander import Expander
from taskqueue_core.hooks import Identity
from taskqueue_server import dashboard
from taskqueue_server.routing.operations import Scope
from tests.dashboard.support import ADMIN, PAGE, Gate, post
from tests.server.support import Running, eventually, http, running

ONLY_A = Identity(name="a", verbs=frozenset({"admin"}), keys=("alpha", "alpha-*"))
NO_ADMIN = Identity(name="w", verbs=frozenset({"consume", "publish"}))
LOOKS = 10.0
OWN = {"origin": "http://127.0.0.1:8420"}
"""headers of a request that a page of this server causes"""
pytestmark = pytest.mark.fast_clock


@pytest.fixture
def gate(it: Running) -> Gate:
    """An authentication plugin with three tokens."""
    gate = Gate(all=ADMIN, a=ONLY_A, w=NO_ADMIN)
    it.context.hooks.register(gate)
    return gate


@pytest.fixture
async def signed_in(client: httpx2.AsyncClient, gate: Gate) -> httpx2.AsyncClient:
    """A client that is signed in with a token for the queues that begin with ``alpha``."""
    del gate
    answer = await post(client, "/login", token="a", next="/workers")
    assert (answer.status_code, answer.headers["location"]) == (303, "/workers")
    return client


async def test_signing_in(client: httpx2.AsyncClient, gate: Gate) -> None:
    """Security 1, 2: the sign-in page accepts a token with the verb admin and refuses any other.

    The token never appears in URLs or pages.
    """
    answer = await client.get("/queues/alpha/dead?filter=a%20b")
    assert answer.status_code == 303
    assert answer.headers["location"] == "/login?next=%2Fqueues%2Falpha%2Fdead%3Ffilter%3Da%2520b"
    form = await client.get(answer.headers["location"])
    assert 'value="/queues/alpha/dead?filter=a%20b"' in form.text
    assert "Workers</a>" not in form.text
    for token, status in (("wrong-token", 401), ("", 401), ("w", 403), ("x" * 5000, 401)):
        refused = await post(client, "/login", token=token)
        assert refused.status_code == status
        assert 'role="alert"' in refused.text
        assert "set-cookie" not in refused.headers
        assert not token or len(token) == 1 or token not in refused.text
    welcome = await post(client, "/login", token="all", next="//evil.example")
    assert welcome.headers["location"] == "/"
    cookie = welcome.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert (await client.get("/")).status_code == 200
    leaving = await post(client, "/logout")
    assert leaving.headers["location"].startswith("/login")
    client.cookies.clear()
    assert (await client.get("/")).status_code == 303
    del gate.tokens["all"]


async def test_who_is_not_known(client: httpx2.AsyncClient, gate: Gate) -> None:
    """Security 2: without a token, only the sign-in form and static files are accessible."""
    del gate
    for one in dashboard.OPERATIONS:
        path = one.path.replace("{key}", "alpha").replace("{id}", "one")
        if one.verb is None:
            continue
        assert one.verbs == (("observe", "admin") if one.method == "GET" else ("admin",))
        assert (one.scope is Scope.PATH) == ("{key}" in one.path)
        answer = await client.request(one.method, path)
        assert answer.status_code == 303
        assert answer.headers["location"].startswith("/login")
        script = await client.request(one.method, path, headers={"hx-request": "true"})
        assert script.headers["hx-redirect"].startswith("/login")
    stream = await client.get("/live?view=overview", headers={"accept": "text/event-stream"})
    assert stream.status_code == 401


async def test_some_queues_only(it: Running, signed_in: httpx2.AsyncClient) -> None:
    """Security 2: a token for key A sees nothing of key B on any page: no name, no worker and no count."""
    await it.publish("one", key="alpha")
    await it.publish("one", "secret-id", key="bravo")
    secret = Schedule("of-bravo", Every(60), TaskTemplate.of("bravo"))
    await it.context.queue.schedules.put(secret)
    subscriptions = [
        it.context.backend.subscribe([key], f"works-{key}") for key in ("alpha", "bravo")
    ]
    both = it.context.backend.subscribe(["alpha", "bravo"], "works-both")
    for page in (
        "/",
        "/workers",
        "/schedules",
        "/queues/alpha",
        "/find?q=one",
        "/find?q=secret-id",
        "/find?q=bravo",
    ):
        answer = await signed_in.get(page)
        assert "works-bravo" not in answer.text
        assert "works-both" not in answer.text
        assert "bravo" not in answer.text.replace("“bravo”", "").replace('value="bravo"', "")
        assert "bravo" not in answer.headers.get("location", "")
    for name in ("works-bravo", "works-both"):
        page = (await signed_in.get(f"/workers/{name}")).text.replace(name, "")
        assert "Not connected" in page
        assert "bravo" not in page
    page = (await signed_in.get("/")).text
    assert 'data-ledger-published="1"' in page
    assert "your token permits" in page
    for method, path in (
        ("GET", "/queues/bravo"), ("GET", "/queues/bravo/dead"), ("GET", "/tasks/bravo/one"),
        ("POST", "/queues/bravo/pause"), ("POST", "/queues/bravo/purge"), ("POST", "/tasks/bravo/one"),
        ("POST", "/queues/bravo/delete"), ("GET", "/schedules/of-bravo"), ("POST", "/schedules/of-bravo"),
        ("POST", "/queues/bravo/settings"), ("POST", "/queues/bravo/dead"),
        ("GET", "/live?view=queue&key=bravo"), ("GET", "/live?view=task&key=bravo&id=one"),
    ):  # fmt: skip
        form = {"action": "x"} if method == "POST" else None
        answer = await signed_in.request(method, path, data=form, headers=OWN)
        assert answer.status_code == 403, path
        assert "cross-site" not in answer.text
        assert "secret-id" not in answer.text
    for subscription in (*subscriptions, both):
        await subscription.close()


async def test_a_workflow_whose_steps_are_not_known_yet(
    it: Running, signed_in: httpx2.AsyncClient
) -> None:
    """Security 2, U15: until its steps say what the right is, a token for some queues sees and does nothing with it.

    After that, it sees and cancels only a workflow all of whose steps are in its queues.
    """
    workflows = it.context.queue.workflows

    async def cancel(name: str) -> int:
        form = {"action": "cancel", "confirm": "cancel"}
        answer = await signed_in.post(f"/workflows/{name}", data=form, headers=OWN)
        assert "cross-site" not in answer.text
        return answer.status_code

    for name, key in (("ours", "alpha"), ("theirs", "bravo")):
        await workflows.put([WorkflowStep.of("secret", key)], id=name)
        shown = await signed_in.get(f"/workflows/{name}")
        assert shown.status_code == 200
        assert "Stored" in shown.text
        assert await cancel(name) == 409
    assert "ours" not in (await signed_in.get("/workflows")).text
    await Expander(it.context.backend).drain()
    page = (await signed_in.get("/workflows")).text
    assert "/workflows/ours" in page
    assert "theirs" not in page
    for name, status in (("ours", 200), ("theirs", 403)):
        assert (await signed_in.get(f"/workflows/{name}")).status_code == status
    assert [await cancel(name) for name in ("theirs", "ours")] == [403, 303]
    await Expander(it.context.backend).drain()
    states = [await workflows.get(name) for name in ("ours", "theirs")]
    assert [each and each.state for each in states] == [WorkflowState.ENDED, WorkflowState.RUNNING]


async def _events(client: httpx2.AsyncClient, path: str) -> AsyncIterator[str]:
    headers = {"accept": "text/event-stream"}
    async with client.stream("GET", path, headers=headers) as stream:
        assert stream.status_code == 200
        async for line in stream.aiter_lines():
            yield line


async def test_a_stream_of_some_queues() -> None:
    """Security 2: the event stream for a token of key A contains nothing about key B."""
    async with running() as it:
        it.context.hooks.register(Gate(a=ONLY_A))
        await it.publish("one", key="alpha")
        await it.publish("one", "two", key="bravo")
        async with http(it, headers={"authorization": "Bearer a"}) as client:
            for view in ("overview", "workers", "queue&key=alpha"):
                events = _events(client, f"/live?view={view}")
                lines = [await anext(events) for _ in range(3)]
                await events.aclose()  # type: ignore[attr-defined]
                assert '"published":1' in lines[1]
                assert "bravo" not in "".join(lines)


async def test_a_stream_of_a_token_that_is_taken_away() -> None:
    """Security 6: after its token is revoked, the event stream ends with the reason and frees its place."""
    async with running() as it:
        gate = Gate(all=ADMIN)
        it.context.hooks.register(gate)
        async with http(it, headers={"authorization": "Bearer all", **PAGE}) as client:
            events = _events(client, "/live?view=overview")
            await anext(events)
            gate.tokens.clear()
            async with asyncio.timeout(LOOKS):
                lines = [line async for line in events]
            assert lines[-3:-1] == ["event: bye", 'data: {"reason":"signed-out"}']
            sampler = _sampler(it)
            await eventually(lambda: len(sampler.room) == 0)


def _sampler(it: Running) -> dashboard.StatsPoller:
    return dashboard.StatsPoller.of(it.context)

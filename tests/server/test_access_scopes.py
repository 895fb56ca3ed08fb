"""The verbs and keys of a token are enforced in every HTTP operation, on every page and on every websocket."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.routing import Route, WebSocketRoute
from websockets.exceptions import ConnectionClosed

from taskqueue_core.capabilities import StoredSchedule, control_of
from taskqueue_core.hooks import INTERNAL_QUEUES
from taskqueue_core.tasks import Health, Settled, State
from taskqueue_dispatch.names import CALLBACKS
from taskqueue_memory import MemoryBackend
from taskqueue_prefect.reconcile import KEY as LEASE
from taskqueue_server import prefect
from taskqueue_server.api.table import OPERATIONS
from taskqueue_server.app import create_app
from taskqueue_server.auth import access
from taskqueue_server.dashboard.app import OPERATIONS as PAGES
from taskqueue_server.metrics import http as http_metrics
from taskqueue_server.routing import bodies
from taskqueue_server.routing.operations import Operation, Scope
from tests.server.access import ADMIN, ALL, A, B, bearer, entry, everybody, write
from tests.server.support import eventually, http, problem, receipts, running, settings

EVERYTHING = (*OPERATIONS, *http_metrics.OPERATIONS, *prefect.OPERATIONS, *PAGES)
GUARDED = [one for one in EVERYTHING if one.verbs]
PUBLIC = {
    "GET /health",
    "GET /ready",
    "GET /alive",
    "GET /v1/limits",
    "GET /v1/openapi.json",
    "GET /v1/asyncapi.json",
    "GET /api/admin/version",
    "GET /api/health",
    "GET /api/ready",
    "GET /login",
    "POST /login",
    "POST /logout",
    "GET /static/{name}",
}
"""Operations that need no token; none of them shows a queue, a task or a worker."""
SOCKETS = {"/v1/socket", "/api/task_runs/subscriptions/scheduled", "/api/events/in"}
LISTS = {
    "GET /v1/queues",
    "GET /v1/workers",
    "GET /metrics",
    "GET /",
    "GET /workers",
    "GET /workers/{name}",
    "GET /dead",
    "POST /dead",
    "GET /v1/schedules",
    "GET /schedules",
    "GET /v1/workflows",
    "GET /workflows",
    "GET /v1/audit",
    "GET /audit",
    "GET /live",
    "GET /find",
}
"""Operations that show each token only the parts about its own keys."""
BODIES: dict[str, Any] = {
    "POST /v1/tasks": {"key": "a", "id": "x"},
    "POST /v1/tasks/batch": {"key": "a", "id": "x"},
    "POST /v1/retries": {"task": {"key": "a", "id": "x"}, "delay": 1},
    "POST /v1/workflows": {"steps": [{"name": "s", "key": "a"}], "id": "other"},
    "POST /v1/workflows/{id}/steps": {"by": {"key": "a", "task_id": "x.s"}, "steps": []},
}
"""Operations whose key is in the request body."""
SCHEDULE: Any = {"when": {"type": "every", "seconds": 60}, "call": {"key": "a"}}
OF_SCHEDULES = {
    "GET /v1/schedules/{name}",
    "PUT /v1/schedules/{name}",
    "DELETE /v1/schedules/{name}",
    "POST /v1/schedules/{name}/pause",
    "POST /v1/schedules/{name}/resume",
    "GET /v1/schedules/{name}/next",
    "POST /v1/schedules/{name}/run",
    "GET /schedules/{name}",
    "POST /schedules/{name}",
}
"""Operations that need a right for the queue of the schedule."""
_FLOW = "/v1/workflows/{id}"
OF_WORKFLOWS = {f"GET {_FLOW}", f"POST {_FLOW}/cancel", f"GET {_FLOW[3:]}", f"POST {_FLOW[3:]}"}
"""Operations that need a right for the queue of each step of the workflow."""
WRONG = "tq_wrong"


def name(one: Operation) -> str:
    """Return the method and path of an operation."""
    return f"{one.method} {one.path}"


async def ask(client: httpx2.AsyncClient, one: Operation, token: str | None) -> httpx2.Response:
    """Call an operation with the key ``a``."""
    path = one.path.replace("{key}", "a").replace("{id}", "x").replace("{name}", "s")
    path += "?state=dead" if one.id == "listing_tasks" else ""
    headers = {"content-type": one.media_type, "accept": "application/json"}
    body = BODIES.get(name(one), one.example or {})
    if name(one) == "PUT /v1/schedules/{name}":
        body = {"schedule": SCHEDULE}
    return await client.request(
        one.method,
        path,
        headers=headers | ({} if token is None else bearer(token)),
        content=json.dumps(body) if one.body is not None else None,
    )


def denied(answer: httpx2.Response, status: int) -> None:
    """Check that a request was refused.

    A dashboard page redirects a client without a token to the sign-in page instead.
    """
    if answer.status_code in {302, 303}:
        assert status == 401
        assert answer.headers["location"].startswith("/login")
    else:
        assert answer.status_code == status, answer.text


def test_every_route_is_in_a_table() -> None:
    """Security 2: every route is an operation in the tables, which state the required rights, or a known websocket."""
    app = create_app(MemoryBackend(), settings())
    paths = {route.path for route in app.routes if isinstance(route, Route)}
    assert paths == {one.path for one in EVERYTHING}
    sockets = {route.path for route in app.routes if isinstance(route, WebSocketRoute)}
    assert sockets == SOCKETS
    assert len(app.routes) == len(paths) + len(sockets)


def test_what_is_public() -> None:
    """Security 3: every operation without a verb is on the list of public operations.

    An operation that checks the key itself is a filtered list, or has the key in its body.
    """
    assert {name(one) for one in EVERYTHING if not one.verbs} == PUBLIC
    assert {name(one) for one in GUARDED if one.scope is Scope.HANDLER} == (
        LISTS | {*BODIES} | OF_SCHEDULES | OF_WORKFLOWS
    )
    for one in GUARDED:
        assert set(one.verbs) <= set(ALL)
        assert ("{key}" in one.path) == (one.scope is Scope.PATH), name(one)


async def test_every_operation(tmp_path: Path) -> None:
    """Fault K1, security 2: 401 without a token, 403 without the verb or the key, and success with verb and key."""
    rows = [entry(ADMIN, "admin"), entry(A, "a", keys=["a"]), entry(B, "b", keys=["b"])]
    rows += [entry(f"only {verb}", verbs=[verb]) for verb in ALL]
    path = write(tmp_path / "tokens.toml", *rows)
    async with running(tokens_file=path) as it, http(it) as client:
        schedules = it.backend.schedules  # type: ignore[attr-defined] # memory
        stored = StoredSchedule(key="a", name="s", spec=b"{}")
        await schedules.put(stored)
        for one in GUARDED:
            for stranger in (None, WRONG):
                denied(await ask(client, one, stranger), 401)
            for verb in set(ALL) - set(one.verbs):
                denied(await ask(client, one, f"only {verb}"), 403)
            if one.scope is Scope.PATH or name(one) in {*BODIES, *OF_SCHEDULES}:
                others = await ask(client, one, B)
                if name(one) == "POST /v1/tasks/batch":
                    assert others.json()["code"] == "forbidden"
                else:
                    denied(others, 403)
            elif one.scope is Scope.SERVER:
                denied(await ask(client, one, A), 403)
        assert await it.backend.control.queues() == ()  # type: ignore[attr-defined]
        for one in GUARDED:
            await schedules.put(stored)
            if name(one) != "GET /live":  # the response of an event stream never ends
                token = ADMIN if one.scope is Scope.SERVER else A
                answer = await ask(client, one, token)
                assert answer.status_code not in {401, 403, 500}, (name(one), answer.text)


async def test_lists_leave_out_what_is_anothers(tmp_path: Path) -> None:
    """Security 2: a token sees nothing of a queue whose key it does not grant: no worker and no count."""
    path = everybody(tmp_path / "tokens.toml")
    async with (
        running(tokens_file=path) as it,
        http(it) as client,
        it.worker("worker-of-a", "a", token=A),
        it.worker("worker-of-canary", "canary", token=ADMIN),
    ):
        await it.publish("t1", key="a")
        await it.publish("t2", key="canary")
        stored = StoredSchedule(key="canary", name="of-canary", spec=b"{}")
        await it.backend.schedules.put(stored)  # type: ignore[attr-defined] # memory
        for one in GUARDED:
            if name(one) in LISTS - {"GET /live"}:
                where = one.path.replace("{name}", "w1") + "?q=canary" * (one.path == "/find")
                answer = await client.get(where, headers=bearer(A))
                assert answer.status_code in {200, 303, 404}, answer.text
                # This page repeats the search text of the request, so the key may appear in it.
                if one.path == "/find":
                    there = await client.get("/find?q=nowhere", headers=bearer(A))
                    told = answer.text.replace("canary", "nowhere")
                    assert (answer.status_code, told) == (there.status_code, there.text)
                else:
                    assert "canary" not in answer.text, name(one)
                    assert (await client.get(where, headers=bearer(ADMIN))).status_code == 200
        for where in ("/v1/queues", "/metrics", "/"):
            assert "canary" in (await client.get(where, headers=bearer(ADMIN))).text
            assert "t1" not in (await client.get(where, headers=bearer(B))).text


async def test_what_is_public_reveals_nothing(tmp_path: Path) -> None:
    """Security 3: public operations reveal no queue, task or worker."""
    path = everybody(tmp_path / "tokens.toml")
    async with (
        running(tokens_file=path) as it,
        http(it) as client,
        it.worker("worker-canary", "canary", token=ADMIN),
    ):
        await it.publish("task-canary", key="canary")
        for one in EVERYTHING:
            if name(one) in PUBLIC and one.method == "GET":
                answer = await client.get(one.path.replace("{name}", "canary"))
                assert "canary" not in answer.text


async def test_details_of_the_store_are_for_those_with_a_token(tmp_path: Path) -> None:
    """Security 3 and 25: the address, version and last error of the store are shown only with a token."""

    class Store(MemoryBackend):
        async def health(self) -> Health:
            return Health(ok=False, backend="memory", details={"error": "canary at 10.0.0.7:6379"})

    path = everybody(tmp_path / "tokens.toml")
    async with running(Store(), tokens_file=path) as it, http(it) as client:
        for where in ("/health", "/ready", "/api/ready"):
            for headers in ({}, bearer(WRONG)):
                answer = await client.get(where, headers=headers)
                assert answer.status_code == 503
                assert "canary" not in answer.text
        assert "canary" in (await client.get("/health", headers=bearer(A))).text


async def test_settings_reach_into_no_other_queue(tmp_path: Path) -> None:
    """Security 2: a token without rights on ``b`` cannot bind a queue to ``b``; existing bindings may stay."""
    path = everybody(tmp_path / "tokens.toml")
    async with running(tokens_file=path) as it, http(it) as client:

        async def put(token: str, *targets: str) -> httpx2.Response:
            found = await client.get("/v1/queues/a/settings", headers=bearer(ADMIN))
            etag = {"if-match": found.headers["etag"]}
            body = {"bound_to": targets}
            where = "/v1/queues/a/settings"
            return await client.put(where, headers=bearer(token) | etag, json=body)

        for targets in (("b",), ("a", "b"), ("a", "unknown")):
            problem(await put(A, *targets), 403, "forbidden")
        assert (await put(A, "a")).status_code == 200
        assert (await put(ADMIN, "a", "b")).status_code == 200
        assert (await put(A, "b", "a")).status_code == 200
        assert (await put(A)).status_code == 200
        problem(await put(A, "b"), 403, "forbidden")
        for target, status in (("b", 403), ("x" * 300, 422), ("a", 200)):
            where = "/v1/queues/a/settings"
            told = await client.patch(where, headers=bearer(A), json={"bound_to": [target]})
            assert told.status_code == status


class TestReceipts:
    """Security 2 and 21: a socket can settle only the receipts that it was given, whatever the worker claims."""

    @pytest.mark.parametrize("verb", ["ack", "redeliver", "retry", "dead_letter", "progress"])
    async def test_of_another_key(self, tmp_path: Path, verb: str) -> None:
        """Fault G5: with a token for ``b``, settling a receipt of ``a`` is answered as lost and changes nothing."""
        path = everybody(tmp_path / "tokens.toml")
        async with (
            running(tokens_file=path) as it,
            it.worker("w1", "a", headers=bearer(A), credit=1) as one,
            it.worker("w2", "b", headers=bearer(B), credit=1) as two,
        ):
            await it.publish("t1", key="a")
            [receipt] = receipts(await one.deliveries(1))
            more: dict[str, Any] = {
                "ack": {"receipts": [receipt]},
                "redeliver": {"receipts": [receipt]},
                "retry": {"receipt": receipt, "error": "x"},
                "dead_letter": {"receipt": receipt, "reason": "x"},
                "progress": {"receipt": receipt, "value": 0.5},
            }
            await two.send(verb, **more[verb])
            assert await two.settled(1) == ([], [receipt])
            assert await it.count(State.IN_FLIGHT, "a") == 1
            await one.send("ack", receipts=[receipt])
            assert await one.settled(1) == ([receipt], [])

    @pytest.mark.parametrize("worker_id", ["w1", "w2"])
    async def test_adopting_what_is_anothers(self, tmp_path: Path, worker_id: str) -> None:
        """Fault G5: a worker whose hello names a receipt of another token does not get it.

        This also holds if both workers have the same worker id.
        """
        path = everybody(tmp_path / "tokens.toml")
        async with (
            running(tokens_file=path) as it,
            it.worker("w1", "a", headers=bearer(A), credit=1) as one,
        ):
            await it.publish("t1", key="a")
            [receipt] = receipts(await one.deliveries(1))
            async with it.worker(worker_id, "b", headers=bearer(B), holding=[receipt]) as two:
                assert two.welcome.get("adopted", []) == []
                assert (await two.frame("revoke"))["receipts"] == [receipt]
                await two.send("ack", receipts=[receipt])
                assert await two.settled(1) == ([], [receipt])
            assert await it.count(State.IN_FLIGHT, "a") == 1
            await one.send("ack", receipts=[receipt])
            assert await one.settled(1) == ([receipt], [])

    async def test_adopting_from_another_server(self, tmp_path: Path) -> None:
        """A delivery that was issued through another server cannot be adopted with a token of another key.

        It stays with its worker, who can still settle it (issue 22, A3).
        """
        path = everybody(tmp_path / "tokens.toml")
        async with running(tokens_file=path) as it:
            await it.publish("t1", key="a")
            async with it.backend.subscribe(["a"], "w1") as elsewhere:
                [delivery] = (await elsewhere.receive(1, 0)).deliveries
                held = [delivery.receipt]
                async with it.worker("w1", "b", headers=bearer(B), holding=held) as two:
                    assert two.welcome.get("adopted", []) == []
                    assert (await two.frame("revoke"))["receipts"] == held
                assert await it.count(State.IN_FLIGHT, "a") == 1
                assert await elsewhere.ack(delivery) == (Settled.OK,)


async def test_who_waits_is_let_go_with_its_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Security 6: a request that waits for a task ends when its token expires."""
    monkeypatch.setattr(access, "RELOAD_SECONDS", 0.05)
    path = everybody(tmp_path / "tokens.toml")
    async with running(tokens_file=path) as it, http(it) as client:
        await it.publish("t1", key="a")
        asked = asyncio.create_task(
            client.get("/v1/tasks/a/t1?wait=20", headers=bearer(A), timeout=20)
        )
        await eventually(lambda: len(it.context.waiters))
        write(path, entry(B))
        problem(await asyncio.wait_for(asked, 5), 401, "unauthenticated")
        assert not it.context.access._watches


@pytest.mark.parametrize("key", [CALLBACKS, LEASE])
async def test_internal_queues_are_out_of_reach(tmp_path: Path, key: str) -> None:
    """A token with ``*`` neither publishes to an internal queue nor consumes from it (row A6).

    A client that put a job among the callbacks could make the dispatcher sign any body and send it to any receiver.
    One that took the lease of the Prefect plugin would stop the search for lost runs.
    """
    family = key.partition(".")[0]
    path = write(
        tmp_path / "tokens.toml",
        entry(ADMIN, "admin"),
        entry(A, "a", keys=[f"{family}*"]),
        entry(B, "b", keys=[key]),
    )
    assert key in INTERNAL_QUEUES
    async with running(tokens_file=path) as it, http(it) as client:
        task = {"key": key, "payload": {}}
        publishes = [
            ("/v1/tasks", task),
            ("/v1/tasks/batch", task),
            ("/v1/retries", {"task": task | {"id": "x"}, "delay": 1}),
        ]
        for token in (ADMIN, A):
            for where, body in publishes:
                answer = await client.post(
                    where,
                    headers=bearer(token)
                    | {"content-type": bodies.NDJSON if "batch" in where else bodies.JSON},
                    content=json.dumps(body),
                )
                assert answer.status_code == 403 or "forbidden" in answer.text, answer.text
            with pytest.raises(ConnectionClosed, match="forbidden"):
                async with it.worker("w1", key, headers=bearer(token)):
                    pass
            answer = await client.get(f"/v1/queues/{key}", headers=bearer(token))
            assert answer.status_code == 200
            answer = await client.put(
                f"/v1/queues/{family}.x/settings", headers=bearer(token), json={"bound_to": [key]}
            )
            problem(answer, 422, "invalid_input", "bound_to")
        ledger = await control_of(it.backend).ledger(key)
        assert ledger.published == 0
        answer = await client.post("/v1/tasks", headers=bearer(B), json=task)
        assert answer.status_code == 201, answer.text

"""The audit log over HTTP: which actions are recorded, with which fields, and who may read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from taskqueue_core.capabilities import AuditEntry
from taskqueue_core.errors import BackendUnavailable
from tests.server.access import ADMIN, A, bearer, entry, everybody, write
from tests.server.support import Running, http, running
from tests.server.test_access_scopes import GUARDED, ask, name

UNRECORDED = {
    "POST /v1/maintain",
    "DELETE /v1/tasks/{key}/{id}",
    "POST /v1/tasks/{key}/{id}/reschedule",
    "POST /v1/queues/{key}/statuses",
    "POST /v1/queues/{key}/results",
    "POST /v1/workflows/{id}/cancel",
    "POST /v1/tasks/{key}/{id}/ticket",
}
"""Operations of applications, which are recorded only with a token of an operator, and those that change nothing."""


async def _dead(it: Running, *ids: str) -> None:
    """Publish tasks to the queue ``a``, and make them dead letters."""
    await it.publish(*ids, key="a")
    subscription = it.backend.subscribe(["a"], "w")
    for delivery in (await subscription.receive(len(ids), 5)).deliveries:
        await subscription.dead_letter(delivery, reason="refused")  # type: ignore[attr-defined]
    await subscription.close()


async def _entries(client: httpx2.AsyncClient, token: str = ADMIN) -> list[dict[str, Any]]:
    answer = await client.get("/v1/audit", headers=bearer(token))
    assert answer.status_code == 200, answer.text
    entries: list[dict[str, Any]] = answer.json()["entries"]
    return entries


async def test_what_operators_do_is_recorded(tmp_path: Path) -> None:
    """U21: an entry has the name of the token, the action, the queue, the number of tasks and what was chosen."""
    path = everybody(tmp_path / "tokens.toml")
    async with running(tokens_file=path) as it, http(it, headers=bearer(ADMIN)) as client:
        await _dead(it, "one", "two", "three")
        await it.publish("four", "five", key="a")
        url = "/v1/queues/a"
        await client.post(f"{url}/dead-letters/one/redrive")
        await client.post(f"{url}/dead-letters/redrive", json={"filter": {"reason": "refused"}})
        await client.post(f"{url}/pause")
        await client.patch(
            f"{url}/settings", json={"rate_limit": {"max_tokens": 5}, "paused": False}
        )
        await client.patch(f"{url}/settings", json={"intake_paused": True})
        await client.patch(f"{url}/settings", json={"order": "fair", "paused_tenants": ["b", "c"]})
        await client.patch(f"{url}/settings", json={"paused_tenants": []})
        await client.patch(f"{url}/settings", json={"paused_tenants": ["b"]})
        await client.patch(f"{url}/settings", json={"paused_tenants": ["c"]})
        await client.post(f"{url}/purge?confirm=a")
        await client.request("DELETE", "/v1/tasks/a/four")
        found = [
            (e["actor"], e["action"], e["key"], e["tasks"], e["details"])
            for e in await _entries(client)
        ]
        rate = '{"max_tokens":5,"interval":1,"interval_unit":"SECONDS"}'
        assert found == [
            ("admin", "cancel", "a", 0, "id=four"),
            ("admin", "purge", "a", 5, ""),
            ("admin", "change settings", "a", None, 'paused_tenants=["c"]'),
            ("admin", "pause tenant", "a", None, "tenant=b"),
            ("admin", "resume tenant", "a", None, "tenant=b tenant=c"),
            ("admin", "change settings", "a", None, 'order="fair" paused_tenants=["b","c"]'),
            ("admin", "pause", "a", None, "intake"),
            ("admin", "change settings", "a", None, f"rate_limit={rate} paused=false"),
            ("admin", "pause", "a", None, "deliveries"),
            ("admin", "redrive", "a", 2, "reason=refused"),
            ("admin", "redrive", "a", 1, "id=one"),
        ]


async def test_every_operation_of_operators_is_recorded(tmp_path: Path) -> None:
    """U21: a successful request that changes something leaves an entry; one that is refused leaves none."""
    path = write(tmp_path / "tokens.toml", entry(A, "app", verbs=["publish"]), entry(ADMIN, "ops"))
    async with running(tokens_file=path) as it, http(it) as client:
        recorded = 0
        for one in GUARDED:
            if one.method == "GET" or not set(one.verbs) & {"admin"}:
                continue
            before = len(await _entries(client))
            await ask(client, one, A)
            confirmed = msgspec.structs.replace(one, path=f"{one.path}?confirm=a")
            asks = any(query.name == "confirm" and query.required for query in one.query)
            answer = await ask(client, confirmed if asks else one, ADMIN)
            after = len(await _entries(client))
            if answer.status_code >= 400:
                assert after == before, name(one)
            elif name(one) not in UNRECORDED and answer.text != '{"deleted":false}':
                assert after == before + 1, (name(one), answer.text)
                recorded += 1
        assert recorded >= 9


async def test_pages_and_rights(tmp_path: Path) -> None:
    """U21: a token sees the entries about its queues only, page by page."""
    path = everybody(tmp_path / "tokens.toml")
    async with running(tokens_file=path) as it, http(it, headers=bearer(ADMIN)) as client:
        for number in range(6):
            await client.post(f"/v1/queues/{'ab'[number % 2]}/pause")
        await it.backend.audit.record(AuditEntry(actor="ops", action="start migration"))  # type: ignore[attr-defined]
        assert [e["key"] for e in await _entries(client, A)] == ["a"] * 3
        assert len(await _entries(client)) == 7
        page = await client.get("/v1/audit?limit=2", headers=bearer(A))
        assert len(page.json()["entries"]) == 2
        rest = await client.get(f"/v1/audit?limit=2&after={page.json()['next']}", headers=bearer(A))
        assert [e["key"] for e in rest.json()["entries"]] == ["a"]
        assert "next" not in rest.json()
        assert (await client.get("/v1/audit?after=x")).status_code == 422
        shown = (await client.get("/audit", headers={"accept": "text/html"})).text
        assert "Start migration" in shown
        assert "Start migration" not in (await client.get("/audit", headers=bearer(A))).text


async def test_a_store_that_takes_no_entry(caplog: pytest.LogCaptureFixture) -> None:
    """U21: the action stays done and is answered; the log of the server has the entry."""
    async with running() as it, http(it) as client:

        async def record(_: AuditEntry) -> None:
            raise BackendUnavailable("away")

        it.backend.audit.record = record  # type: ignore[attr-defined]
        assert (await client.post("/v1/queues/a/pause")).status_code == 200
        lost = [
            r for r in caplog.records if r.name == "taskqueue.audit" and r.levelname == "WARNING"
        ]
        assert [(r.action, r.key, r.identity) for r in lost] == [("pause", "a", "anybody")]  # type: ignore[attr-defined]

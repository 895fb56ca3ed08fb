"""Lists of tasks and the details of a task over HTTP, and through the backend named ``server``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import pytest
from msgspec import structs

from taskqueue_core.backend import Capabilities, Capability
from taskqueue_core.capabilities import Erasure, QueueSettings, count_tagged, listing_of
from taskqueue_core.errors import BackendUnavailable, InvalidInput
from taskqueue_core.tasks import State, Task
from taskqueue_memory import MemoryBackend, MemorySettings
from taskqueue_remote import RemoteBackend
from tests.server.access import bearer, entry, write
from tests.server.support import app_client, http, problem, running
from tests.server.test_http_operations import bury

ADMIN, APP = "tq_operates", "tq_publishes"
LIST = "/v1/queues/k/tasks"


async def test_pages_of_a_list(api: httpx2.AsyncClient, backend: MemoryBackend) -> None:
    """U18: each page has the URL of the next one; all of them together have each task once, in both orders."""
    await backend.publisher.publish(*(Task(key="k", id=f"t{n}", tenant="a") for n in range(5)))
    for newest in ("", "&newest=true"):
        where: str | None = f"{LIST}?state=waiting&limit=2{newest}"
        found: list[str] = []
        while where is not None:
            page = await api.get(where)
            body = page.json()
            found += [task["task_id"] for task in body["tasks"]]
            assert body["looked_at"] == len(body["tasks"])
            where = page.links["next"]["url"] if "next" in body else None
        assert found == sorted(found, reverse=bool(newest))
        assert len(found) == 5
    (task, *_) = (await api.get(f"{LIST}?state=waiting&tenant=a")).json()["tasks"]
    assert task | {"updated_at": 0} == {
        "key": "k", "task_id": "t0", "state": "waiting", "attempt": 1, "losses": 0, "priority": 5,
        "tenant": "a", "ordering_key": None, "tags": [], "updated_at": 0, "due_at": None,
        "worker_id": None, "delivered_at": None, "error": None,
    }  # fmt: skip
    assert (await api.get(f"{LIST}?state=waiting&tenant=b")).json()["tasks"] == []


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("", "state"),
        ("state=running", "state"),
        ("state=waiting&tag=user:1", "tag"),
        ("state=waiting&worker=w", "worker"),
        ("state=done&worker=w", "worker"),
        ("state=waiting&limit=1001", "limit"),
        ("state=waiting&after=x", "after"),
        (f"state=waiting&after={'x' * 3000}", "after"),
        ("state=waiting&after=%00", "after"),
        ("state=waiting&after=%ff%c3%a9", "after"),
        ("state=waiting&after=%0a", "after"),
        ("state=waiting&after=", "after"),
        ("state=waiting&after=A&after=B", "query"),
        ("state=waiting&newest=1", "newest"),
        ("state=waiting&tenants=a", "query"),
        ("state=waiting&since=-1h", "since"),
        ("state=done&since=soon", "since"),
        ("state=done&since=", "since"),
        ("state=done&until=9999-12-31T23:59-14:00", "until"),
        ("state=done&since=1h&until=2h", "until"),
    ],
)
async def test_what_is_refused(api: httpx2.AsyncClient, query: str, field: str) -> None:
    """U18: the error names the parameter of a list that is not possible."""
    problem(await api.get(f"{LIST}?{query}"), 422, "invalid_input", field)


async def test_a_list_by_time(api: httpx2.AsyncClient, backend: MemoryBackend) -> None:
    """U18: a time that is relative has one meaning on all pages: the first response and its link say which."""
    await backend.publisher.publish(*(Task(key="k", id=f"t{n}", tenant="a") for n in range(5)))
    async with backend.subscribe(["k"], "w1") as subscription:
        deliveries = (await subscription.receive(5, 0)).deliveries
        await subscription.ack(*deliveries)
    first = await api.get(f"{LIST}?state=done&limit=3&since=-1h&until=2100-01-01T00:00Z")
    body = first.json()
    assert backend.now() - 3700 < body["since"] <= backend.now() - 3600
    assert body["until"] == 4_102_444_800.0
    second = await api.get(first.links["next"]["url"])
    assert len(body["tasks"] + second.json()["tasks"]) == 5
    given = {name: body[name] for name in ("since", "until")}
    again = await api.get(LIST, params={"state": "done", "after": body["next"], **given})
    assert again.json() == second.json()
    (task, *_) = body["tasks"]
    assert (task["worker_id"], task["delivered_at"]) == ("w1", deliveries[0].delivered_at)
    assert (await api.get(f"{LIST}?state=done&until=-1h")).json()["tasks"] == []


async def test_a_cursor_of_another_list(api: httpx2.AsyncClient, backend: MemoryBackend) -> None:
    """U18: a cursor is refused for another state, filter, order or queue."""
    await backend.publisher.publish(Task(key="k"), Task(key="k"))
    cursor = (await api.get(f"{LIST}?state=waiting&limit=1")).json()["next"]
    for other in ("state=dead", "state=waiting&tenant=a", "state=waiting&newest=true"):
        problem(await api.get(f"{LIST}?{other}&after={cursor}"), 422, "invalid_input", "after")
    where = f"/v1/queues/other/tasks?state=waiting&after={cursor}"
    problem(await api.get(where), 422, "invalid_input", "after")


async def test_a_backend_without_lists() -> None:
    """U18: the response is 501 and names the capability."""

    class Store(MemoryBackend):
        capabilities = Capabilities(
            names=MemoryBackend.capabilities.names - {Capability.LISTING}, shared=False
        )

    backend = Store()
    await backend.publisher.publish(Task(key="k", id="a"))
    async with app_client(backend) as api:
        for where in (f"{LIST}?state=waiting", "/v1/tasks/k/a?detail=true"):
            problem(await api.get(where), 501, "capability_missing")
        assert (await api.get("/v1/tasks/k/a")).status_code == 200


async def test_details_by_right(tmp_path: Path) -> None:
    """U21: only ``admin`` sees the payload and the headers of a live task or dead letter; no token those of others."""
    rows = [entry(ADMIN, "ops", verbs=["admin"]), entry(APP, "app", verbs=["publish"])]
    async with running(tokens_file=write(tmp_path / "t.toml", *rows)) as it, http(it) as client:
        secret: dict[str, Any] = {"payload": b'"secret"', "headers": {"h": "secret"}}
        await it.publish("done", key="k", content_digest=b"d" * 16, **secret)
        async with it.backend.subscribe(["k"], "w1") as subscription:
            (delivery,) = (await subscription.receive(1, 5)).deliveries
            await subscription.ack(delivery, results=[b'"secret"'])
        await it.publish("live", key="k", tags=("user:1",), **secret)

        async def detail(token: str, task_id: str) -> dict[str, Any]:
            where = f"/v1/tasks/k/{task_id}?detail=true&wait=0"
            answer = await client.get(where, headers=bearer(token))
            assert answer.status_code == 200
            plain = await client.get(f"/v1/tasks/k/{task_id}", headers=bearer(token))
            found: dict[str, Any] = answer.json()
            shown: dict[str, Any] = found.pop("detail")
            assert found == plain.json()
            assert ("secret" in answer.text) == (token == ADMIN and task_id == "live")
            return shown

        task = {"id": "live", "key": "k", "tags": ["user:1"]}
        for_admins = {"payload": "secret", "headers": {"h": "secret"}}
        assert (await detail(APP, "live"))["task"] == task
        assert (await detail(ADMIN, "live"))["task"] == task | for_admins
        assert (await detail(ADMIN, "done"))["task"] == {"id": "done", "key": "k"}
        assert (await detail(APP, "done"))["worker_id"] == "w1"
        missing = await client.get("/v1/tasks/k/no?detail=true", headers=bearer(APP))
        problem(missing, 404, "unknown_task")
        lists = await client.get(f"{LIST}?state=waiting", headers=bearer(APP))
        problem(lists, 403, "forbidden")


async def test_the_remote_backend_lists_the_same() -> None:
    """U18, G4: through a server, lists, details and errors are those of the store."""
    store = MemoryBackend()
    settings = QueueSettings(index=("user",), keep_ended=600)
    await store.control.configure("k", settings)
    await bury(store, "x1", "x2", "x3")
    task = Task(key="k", id="t", tags=("user:1",), tenant="a", headers={"h": "1"}, payload=b"[1]")
    await store.publisher.publish(task, Task(key="k", id="later", not_before=store.now() + 900))
    async with store.subscribe(["k"], "w1") as subscription, running(store) as it:
        remote = RemoteBackend(it.server.url)
        ours, theirs = listing_of(store), listing_of(remote)
        (delivery,) = (await subscription.receive(1, 5)).deliveries
        for query in (
            {"state": State.DEAD, "limit": 2, "newest": True},
            {"state": State.SCHEDULED},
            {"state": State.IN_FLIGHT, "worker": "w1", "tenant": "a"},
            {"tag": "user:1"},
            {"state": State.DONE, "worker": "w1"},
        ):
            page = await theirs.tasks("k", **query)
            assert page == await ours.tasks("k", **query)
            if page.next:
                rest = await theirs.tasks("k", after=page.next, **query)
                assert [task.task_id for task in rest.tasks] == ["x1"]
        for task_id in ("t", "later", "x1", "no"):
            assert await theirs.task("k", task_id) == await ours.task("k", task_id)
        before = await count_tagged(ours, "k", "user:1")
        assert before == Erasure(tasks={State.IN_FLIGHT: 1})
        assert await count_tagged(theirs, "k", "user:1") == before
        await subscription.ack(delivery)
        ended = await ours.task("k", "t")
        assert ended is not None
        bare = structs.replace(ended.task, payload=b"null", headers={})
        assert await theirs.task("k", "t") == structs.replace(ended, task=bare)
        wrong: tuple[dict[str, Any], ...] = (
            {}, {"tag": "job:1"}, {"state": State.DEAD, "limit": 0},
            {"state": State.DEAD, "after": "x" * 9000}, {"state": State.DEAD, "after": "x"},
            {"state": State.WAITING, "worker": "w"}, {"state": State.WAITING, "since": 5},
            {"state": State.DEAD, "since": 5, "until": 5},
        )  # fmt: skip
        for query in wrong:
            errors = []
            for listing in (ours, theirs):
                with pytest.raises(InvalidInput) as refused:
                    await listing.tasks("k", **query)
                errors.append(refused.value.field)
            assert errors[0] == errors[1]
        assert await theirs.erase("k", "user:1", limit=5) == Erasure(tasks={State.DONE: 1})
        assert await ours.task("k", "t") is None
        await remote.aclose()


async def test_erasure_of_a_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """U18, U21: an erasure is counted first, then done and recorded, and the answer says that the journal remains."""
    backend = MemoryBackend(settings=MemorySettings(journal=tmp_path / "journal"))
    settings = QueueSettings(index=("user",), journal=True)
    await backend.control.configure("k", settings)
    await bury(backend, "dead")
    tagged = [Task(key="k", id=f"t{n}", tags=("user:1",)) for n in range(3)]
    await backend.publisher.publish(*tagged, Task(key="k", id="other", tags=("user:2",)))
    async with app_client(backend) as api:
        erase = "/v1/queues/k/erase"
        counted = await api.post(erase, json={"tag": "user:1", "dry_run": True})
        shown = {"tasks": {"waiting": 3}, "count": 3, "more": False, "journal": True}
        assert counted.json() == shown
        first = (await api.post(erase, json={"tag": "user:1", "limit": 2})).json()
        assert first == shown | {"tasks": {"waiting": 2}, "count": 2, "more": True}
        rest = (await api.post(erase, json={"tag": "user:1"})).json()
        assert rest == shown | {"tasks": {"waiting": 1}, "count": 1}
        assert (await api.get(f"/v1/tasks/k/{tagged[0].id}")).status_code == 404
        for body, field in (({"tag": "job:1"}, "tag"), ({"tag": "user:1", "limit": 0}, "limit")):
            problem(await api.post(erase, json=body), 422, "invalid_input", field)
        assert (await api.post(erase, json={"tag": "user:1", "what": 1})).status_code == 422
    entries = await backend.audit.entries(limit=10)
    assert [(e.action, e.key, e.tasks, e.details) for e in entries] == [
        ("erase", "k", 1, "tag=user:1"),
        ("begin to erase", "k", None, "tag=user:1"),
        ("erase", "k", 2, "tag=user:1"),
        ("begin to erase", "k", None, "tag=user:1"),
    ]
    ledger = await backend.control.ledger("k")
    assert (ledger.waiting, ledger.dead, ledger.cancelled) == (1, 1, 3)

    async def end(*_: object, **__: object) -> None:
        raise BackendUnavailable("away")

    monkeypatch.setattr(backend.listing, "erase", end)  # as if the server was killed
    async with app_client(backend) as api:
        assert (await api.post(erase, json={"tag": "user:1"})).status_code == 503
    (last,) = await backend.audit.entries(limit=1)
    assert (last.action, last.details) == ("begin to erase", "tag=user:1")
    await backend.aclose()

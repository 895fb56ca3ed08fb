"""Operations for operators over HTTP: pages of queues and workers, settings versions, retries, migration and limits."""

from __future__ import annotations

import time
from typing import Any

import httpx2
import pytest

from taskqueue_core.hooks import Identity
from taskqueue_core.limits import LIMITS
from taskqueue_core.migration import MigratingBackend
from taskqueue_core.tasks import State, Task
from taskqueue_memory import MemoryBackend
from tests.server.support import app_client, problem
from tests.server.test_http_operations import bury

_SETTINGS = "/v1/queues/k/settings"


def as_written(token: str) -> Identity:
    """Return the identity that a token of the form ``verb:pattern`` describes."""
    verb, _, pattern = token.partition(":")
    return Identity(name=token, verbs=frozenset({verb}), keys=(pattern,))


async def walk(client: httpx2.AsyncClient, url: str, what: str, name: str, **query: Any) -> Any:
    """Return the names on each page, following the links between the pages."""
    pages = []
    answer = await client.get(url, params=query)
    while True:
        body = answer.json()
        pages.append([one[name] for one in body[what]])
        if "next" not in answer.links:
            assert "next" not in body
            return pages
        assert body["next"] == pages[-1][-1]
        answer = await client.get(answer.links["next"]["url"])


class TestPages:
    """Fault K6: the size of a list response is bounded, however many queues and workers there are."""

    async def test_queues(self, api: httpx2.AsyncClient, backend: MemoryBackend) -> None:
        """Queues are listed by name, each once. A cursor is a name, which need not belong to a queue."""
        await backend.publisher.publish(*(Task(key=f"q{n}") for n in range(5)))
        names = [f"q{n}" for n in range(5)]
        assert await walk(api, "/v1/queues", "queues", "key", limit=2) == [
            names[:2],
            names[2:4],
            names[4:],
        ]
        assert await walk(api, "/v1/queues", "queues", "key") == [names]
        assert await walk(api, "/v1/queues", "queues", "key", after="q22") == [names[3:]]
        assert (await api.get("/v1/queues?after=zzz")).json() == {"queues": []}

    async def test_many_queues(self, api: httpx2.AsyncClient, backend: MemoryBackend) -> None:
        """With thousands of queues, a page of a hundred queues takes less than a second and stays small."""
        for start in range(0, 5000, LIMITS.batch):
            keys = range(start, start + LIMITS.batch)
            await backend.publisher.publish(*(Task(key=f"q{n:05}") for n in keys))
        begun = time.process_time()
        answer = await api.get("/v1/queues")
        assert time.process_time() - begun < 1
        assert len(answer.json()["queues"]) == 100
        assert len(answer.content) < 100 * 1500

    async def test_workers(self, api: httpx2.AsyncClient, backend: MemoryBackend) -> None:
        """Workers are listed by id, each once."""
        for n in range(3):
            backend.subscribe(["k"], f"w{n}")
        assert await walk(api, "/v1/workers", "workers", "worker_id", limit=2) == [
            ["w0", "w1"],
            ["w2"],
        ]

    @pytest.mark.parametrize(
        "query",
        ["limit=0", "limit=1001", "limit=", "after=", "after=%7B", "limit=1&limit=2", "x=1"],
    )
    async def test_nonsense(self, api: httpx2.AsyncClient, query: str) -> None:
        """Faults K2 and K4: a page size out of bounds, an invalid cursor and an unknown parameter are refused."""
        for url in ("/v1/queues", "/v1/workers"):
            answer = await api.get(f"{url}?{query}")
            field = "query" if "&" in query or "x" in query else query.partition("=")[0]
            problem(answer, 422, "invalid_input", field)

    async def test_only_what_the_token_is_for(self) -> None:
        """Security 2: pages show only queues and workers of the token's keys, and are still full pages."""
        backend = MemoryBackend()
        await backend.publisher.publish(*(Task(key=f"{'ab'[n % 2]}{n}") for n in range(8)))
        backend.subscribe(["a0"], "wa")
        backend.subscribe(["a0", "b1"], "wb")
        async with app_client(backend, as_written) as client:
            client.headers["authorization"] = "Bearer admin:a*"
            pages = await walk(client, "/v1/queues", "queues", "key", limit=2)
            assert pages == [["a0", "a2"], ["a4", "a6"]]
            assert await walk(client, "/v1/workers", "workers", "worker_id") == [["wa"]]


class TestScopes:
    """Security 2: every operation on a key, or on all keys, refuses a token for another key."""

    @pytest.mark.parametrize(
        ("method", "url", "body"),
        [
            ("GET", "/v1/tasks/b/x", None),
            ("GET", "/v1/tasks/b/x?wait=30", None),
            ("GET", "/v1/tasks/b/x/result", None),
            ("DELETE", "/v1/tasks/b/x", None),
            ("POST", "/v1/tasks/b/x/retry", {"payload": 1}),
            ("POST", "/v1/tasks", {"key": "b"}),
            ("POST", "/v1/retries", {"task": {"key": "b", "id": "x"}, "delay": 0}),
            ("POST", "/v1/queues/b/statuses", {"ids": ["x"]}),
            ("POST", "/v1/queues/b/results", {"ids": ["x"]}),
            ("GET", "/v1/queues/b", None),
            ("GET", "/v1/queues/b/ledger", None),
            ("GET", "/v1/queues/b/settings", None),
            ("PUT", "/v1/queues/b/settings", {}),
            ("DELETE", "/v1/queues/b/settings?version=0", None),
            ("POST", "/v1/queues/b/pause", None),
            ("POST", "/v1/queues/b/resume", None),
            ("POST", "/v1/queues/b/purge?confirm=b", None),
            ("DELETE", "/v1/queues/b?confirm=b", None),
            ("GET", "/v1/queues/b/dead-letters", None),
            ("GET", "/v1/queues/b/dead-letters/x", None),
            ("DELETE", "/v1/queues/b/dead-letters/x", None),
            ("POST", "/v1/queues/b/dead-letters/x/redrive", None),
            ("POST", "/v1/queues/b/dead-letters/redrive", {"all": True}),
            ("POST", "/v1/queues/b/dead-letters/discard?confirm=b", {"all": True}),
            ("GET", "/v1/ledger", None),
            ("POST", "/v1/maintain", None),
            ("GET", "/v1/migration", None),
            ("POST", "/v1/migration/start", None),
            ("POST", "/v1/migration/finish", None),
            ("POST", "/v1/migration/rollback", None),
        ],
    )
    async def test_another_key(self, method: str, url: str, body: Any) -> None:
        """A token with all verbs for another key gets 403, and nothing changes."""
        backend = MemoryBackend()
        await backend.publisher.publish(Task(key="b", id="x"))

        def know(token: str) -> Identity | None:
            return Identity(name="a", keys=("a",)) if token == "a" else None

        async with app_client(backend, know) as client:
            answer = await client.request(method, url, json=body)
            problem(answer, 401, "unauthenticated")
            assert answer.headers["www-authenticate"] == "Bearer"
            headers = {"authorization": "Bearer a"}
            problem(await client.request(method, url, json=body, headers=headers), 403, "forbidden")
            ledger = await backend.control.ledger("b")
            assert (ledger.published, ledger.waiting) == (1, 1)
            assert (await backend.control.settings("b")).version == 0


class TestVersions:
    """Fault K6: versions of the settings resource."""

    async def test_if_match(self, api: httpx2.AsyncClient) -> None:
        """The ETag of the settings is their version.

        If-Match must name the current version, and then the version in the body is ignored.
        """
        first = await api.get(_SETTINGS)
        assert first.headers["etag"] == '"0"'
        body = {**first.json(), "version": 999, "max_losses": 1}
        answer = await api.put(_SETTINGS, json=body, headers={"if-match": '"0"'})
        assert (answer.json()["version"], answer.headers["etag"]) == (1, '"1"')
        answer = await api.put(_SETTINGS, json=body, headers={"if-match": '"0"'})
        problem(answer, 412, "settings_conflict")
        answer = await api.delete(_SETTINGS, headers={"if-match": '"0"'})
        problem(answer, 412, "settings_conflict")
        answer = await api.delete(_SETTINGS, headers={"if-match": '"1"'})
        assert (answer.json()["version"], answer.json()["max_losses"]) == (2, 5)
        assert (await api.post("/v1/queues/k/pause")).headers["etag"] == '"3"'

    @pytest.mark.parametrize("tag", ["*", "0", 'W/"0"', '"0", "1"', '"x"', '"1234567890"', ""])
    async def test_other_tags(self, api: httpx2.AsyncClient, tag: str) -> None:
        """Fault K4: an If-Match header that is not a single strong version tag is refused, and nothing changes."""
        for method in ("PUT", "DELETE"):
            body: Any = {} if method == "PUT" else None
            answer = await api.request(method, _SETTINGS, json=body, headers={"if-match": tag})
            problem(answer, 422, "invalid_input", "If-Match")
        answer = await api.delete(f"{_SETTINGS}?version=0", headers={"if-match": '"0"'})
        problem(answer, 422, "invalid_input", "version")


class TestRetry:
    """REV-E2: retrying the task that the path names."""

    _URL = "/v1/tasks/k/a/retry"

    async def test_a_dead_task_keeps_what_it_was(
        self, api: httpx2.AsyncClient, backend: MemoryBackend
    ) -> None:
        """C17: a dead task is retried with its stored payload, and only once per token."""
        subscription = await bury(backend, "a")
        answer = await api.post(self._URL, json={"token": "t"})
        assert (answer.status_code, answer.json()["status"]) == (201, "accepted")
        (delivery,) = (await subscription.receive(1, 1)).deliveries
        assert (delivery.task.payload, delivery.attempt) == (b"[1,  2]", 2)
        answer = await api.post(self._URL, json={"token": "t", "payload": None})
        assert (answer.status_code, answer.json()["status"]) == (200, "duplicate")

    async def test_others_need_their_payload(
        self, api: httpx2.AsyncClient, backend: MemoryBackend
    ) -> None:
        """A task that is not dead can only be retried with a payload, because the store may have forgotten the task."""
        await api.post("/v1/tasks", json={"key": "k", "id": "a"})
        await backend.subscribe(["k"], "w").receive(1, 0)
        problem(await api.post(self._URL, json={}), 409, "not_dead")
        answer = await api.post(self._URL, json={"payload": None, "delay": 60, "error": "e"})
        assert answer.status_code == 201
        (found,) = await backend.control.statuses("k", "a")
        assert found is not None
        assert (found.state, found.error) == (State.SCHEDULED, "e")
        problem(await api.post(self._URL, json={}), 409, "not_dead")

    @pytest.mark.parametrize(
        ("body", "field"),
        [
            ({"at": 1, "delay": 1}, "delay"),
            ({"delay": -1}, "delay"),
            ({"at": 1e18}, "at"),
            ({"token": ""}, "token"),
            ({"key": "k"}, "key"),
        ],
        ids=str,
    )
    async def test_bad_ones(
        self, api: httpx2.AsyncClient, body: dict[str, Any], field: str
    ) -> None:
        """Fault K4: invalid times and unknown fields of a retry are refused."""
        answer = await api.post(self._URL, json={"payload": 1, **body})
        problem(answer, 422, "invalid_input", field)


class TestMigration:
    """Migration from one backend to another, over HTTP."""

    async def test_from_start_to_finish(self) -> None:
        """A migration can be started, rolled back and started again.

        It can be finished only once the old backend has no unfinished tasks.
        """
        old, new = MemoryBackend(), MemoryBackend()
        await old.publisher.publish(Task(key="k", id="a"))
        async with app_client(MigratingBackend(old, new)) as client:
            assert (await client.get("/v1/migration")).json()["phase"] == "idle"
            problem(await client.post("/v1/migration/finish"), 409, "migration_unfinished")
            told = (await client.post("/v1/migration/start")).json()
            assert (told["phase"], told["leaves"], told["unfinished"]) == ("started", "old", ["k"])
            assert (told["queues"][0]["waiting"], told["queues"][0]["takes_in"]) == (1, "new")
            problem(await client.post("/v1/migration/finish"), 409, "migration_unfinished")
            for query in ("force=true", "force=true&confirm=", "force=true&confirm=k", "confirm=k"):
                answer = await client.post(f"/v1/migration/finish?{query}")
                problem(answer, 422, "invalid_input", "confirm")
            answer = await client.post("/v1/migration/rollback")
            assert answer.json()["phase"] == "rolled_back"
            await client.post("/v1/migration/start")
            await client.delete("/v1/tasks/k/a")
            assert (await client.post("/v1/migration/finish")).json()["phase"] == "finished"
            assert (await client.get("/v1/migration")).json()["unfinished"] == []

    async def test_there_is_none(self, api: httpx2.AsyncClient) -> None:
        """On a server with a single backend, the migration operations return 404."""
        problem(await api.get("/v1/migration"), 404, "not_migrating")
        for step in ("start", "finish", "rollback"):
            problem(await api.post(f"/v1/migration/{step}"), 404, "not_migrating")


async def test_limits(api: httpx2.AsyncClient) -> None:
    """Security 12: the server reports its limits from the same table that it enforces."""
    told = (await api.get("/v1/limits")).json()
    assert told["limits"]["payload"] == LIMITS.payload
    assert {"control", "dead_letters"} <= set(told["capabilities"])

"""Queues, dead letters and the server itself, over HTTP."""

from __future__ import annotations

import re
from typing import Any

import httpx2
import pytest

from taskqueue_core.backend import Subscription
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.hooks import Identity
from taskqueue_core.tasks import Health, Task
from taskqueue_memory import MemoryBackend
from taskqueue_server import create_app
from tests.server.support import app_client, problem, settings


async def bury(backend: MemoryBackend, *ids: str) -> Subscription:
    """Create dead letters with these ids."""
    await backend.publisher.publish(*(Task(key="k", id=i, payload=b"[1,  2]") for i in ids))
    subscription = backend.subscribe(["k"], "w")
    for delivery in (await subscription.receive(len(ids), 0)).deliveries:
        await subscription.dead_letter(delivery, "no", "why")
    return subscription


class TestQueues:
    """Counts and settings of queues."""

    async def test_figures(self, api: httpx2.AsyncClient, backend: MemoryBackend) -> None:
        """Law 1: the ledger balances, for a single queue and for the total of all queues."""
        await backend.publisher.publish(Task(key="a"), Task(key="a"), Task(key="b"))
        (one, two) = (await api.get("/v1/queues")).json()["queues"]
        assert (one["key"], one["ledger"]["waiting"], two["key"]) == ("a", 2, "b")
        assert (await api.get("/v1/queues/a")).json() == one
        ledger = (await api.get("/v1/queues/a/ledger")).json()
        assert (ledger["published"], ledger["waiting"]) == (2, 2)
        total = (await api.get("/v1/ledger")).json()
        assert (total["published"], total["balanced"], total["imbalance"]) == (3, True, 0)
        assert (await api.get("/v1/queues/nobody")).json()["ledger"]["published"] == 0

    async def test_settings_are_versioned(self, api: httpx2.AsyncClient) -> None:
        """Fault K6: if two clients change the same version of the settings, the second one gets a conflict."""
        url = "/v1/queues/k/settings"
        found = (await api.get(url)).json()
        assert found["version"] == 0
        changed = {**found, "max_losses": 1, "retry": {**found["retry"], "base": 2}}
        answer = await api.put(url, json=changed)
        assert answer.json() == {**changed, "version": 1, "owners": {"retry": "operator"}}
        problem(await api.put(url, json=changed), 409, "settings_conflict")
        assert (await api.get(url)).json() == answer.json()

    async def test_owners_of_fields(self, api: httpx2.AsyncClient) -> None:
        """U4: PUT and PATCH make changed fields the operator's; a program may send owners as they are."""
        url = "/v1/queues/k/settings"
        declared = {
            "version": 0,
            "capacity": 5,
            "owners": {"capacity": "declared", "retry": "declared"},
        }
        answer = await api.put(url, params={"owners_as_sent": "true"}, json=declared)
        assert answer.json()["owners"] == declared["owners"]
        patched = (await api.patch(url, json={"retry": {"base": 9}, "max_losses": 3})).json()
        assert patched["owners"] == {"capacity": "declared", "retry": "operator"}
        back = (await api.patch(url, json={"owners": {"retry": "declared"}})).json()
        assert back["owners"] == declared["owners"]
        assert back["retry"]["base"] == 9
        put = (await api.put(url, json={"version": 3, "retry": back["retry"]})).json()
        assert put["owners"] == {"capacity": "operator", "retry": "declared"}
        found = (await api.get(url)).json()
        put = (await api.put(url, json={**found, "capacity": 7, "timeout": 30})).json()
        assert put["owners"] == {"capacity": "operator", "timeout": "operator", "retry": "declared"}
        problem(
            await api.patch(url, json={"owners": {"s3cret": "declared"}}),
            422,
            "invalid_input",
            "owners",
        )
        problem(
            await api.patch(url, json={"owners": {"retry": "s3cret"}}),
            422,
            "invalid_input",
            "owners",
        )

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"max_losses": -1}, "max_losses"),
            ({"retry": {"base": -1}}, "retry.base"),
            ({"retry": {"max_attempts": 0}}, "retry.max_attempts"),
            ({"result_ttl": "x"}, "result_ttl"),
            ({"result_ttl": 1e300}, "result_ttl"),
            ({"version": -1}, "version"),
            ({"capacity": 0}, "capacity"),
            ({"capacity": True}, "capacity"),
            ({"max_inflight": "10"}, "max_inflight"),
            ({"rate_limit": 5}, "rate_limit"),
            ({"rate_limit": {}}, "rate_limit.max_tokens"),
            ({"rate_limit": {"max_tokens": 1, "interval": 0}}, "rate_limit.interval"),
            (
                {"rate_limit": {"max_tokens": 1, "interval_unit": "DAYS"}},
                "rate_limit.interval_unit",
            ),
            ({"rate_limit": {"max_tokens": 1, "s3cret": 1}}, "rate_limit"),
            ({"paused": 1}, "paused"),
            ({"s3cret": 1}, "settings"),
            (["s3cret"], "settings"),
        ],
        ids=str,
    )
    async def test_bad_settings_are_named(
        self, api: httpx2.AsyncClient, change: Any, field: str
    ) -> None:
        """Fault K4: the error names the field, the kind of value that was sent, and what is allowed.

        It never contains the value.
        """
        answer = await api.put("/v1/queues/k/settings", json=change)
        told = problem(answer, 422, "invalid_input", field)
        assert re.fullmatch(rf"{field}: got .+; allowed: .+", told["detail"])
        assert "s3cret" not in answer.text

    async def test_settings_that_are_not_json(self, api: httpx2.AsyncClient) -> None:
        """Fault K3: a body that is malformed, wrongly encoded or too deeply nested is refused with 400."""
        for body in (b"{", b"\xff", b"[" * 100_000):
            answer = await api.put(
                "/v1/queues/k/settings", content=body, headers={"content-type": "application/json"}
            )
            problem(answer, 400, "not_json")

    async def test_purge_leaves_alone_what_runs(
        self, api: httpx2.AsyncClient, backend: MemoryBackend
    ) -> None:
        """A purge cancels and counts waiting tasks, and leaves tasks in flight alone."""
        await backend.publisher.publish(*(Task(key="k") for _ in range(3)))
        await backend.subscribe(["k"], "w").receive(1, 0)
        for unconfirmed in ("", "?confirm=", "?confirm=true", "?confirm=K"):
            answer = await api.post(f"/v1/queues/k/purge{unconfirmed}")
            problem(answer, 422, "invalid_input", "confirm")
        assert (await api.post("/v1/queues/k/purge?confirm=k")).json() == {"count": 2}
        assert (await api.post("/v1/queues/k/purge?confirm=k")).json() == {"count": 0}
        ledger = (await api.get("/v1/queues/k/ledger")).json()
        assert (ledger["in_flight"], ledger["cancelled"]) == (1, 2)

    async def test_delete(self, api: httpx2.AsyncClient, backend: MemoryBackend) -> None:
        """A8: a deletion needs the name again, is refused while the queue is in use, and says what it did."""
        await backend.publisher.publish(Task(key="k"), Task(key="k"))
        for unconfirmed in ("", "?confirm=", "?confirm=K"):
            answer = await api.delete(f"/v1/queues/k{unconfirmed}")
            problem(answer, 422, "invalid_input", "confirm")
        told = problem(await api.delete("/v1/queues/k?confirm=k"), 409, "queue_in_use")
        assert "waiting tasks: 2" in told["detail"]
        assert "purge" in told["detail"]
        await backend.control.purge("k")
        answer = await api.delete("/v1/queues/k?confirm=k")
        assert answer.json() == {"deleted": True, "forgotten": 2}
        assert (await api.delete("/v1/queues/k?confirm=k")).json()["deleted"] is False
        assert (await api.get("/v1/queues")).json()["queues"] == []


class TestDeadLetters:
    """Pages, redrive and discard of dead letters."""

    async def test_pages(self, api: httpx2.AsyncClient, backend: MemoryBackend) -> None:
        """Fault K6: dead letters are listed by page and in order, with reason, history and unchanged payload."""
        await bury(backend, "a", "b", "c")
        url = "/v1/queues/k/dead-letters"
        answer = await api.get(url, params={"limit": 2})
        assert b'"payload":[1,  2]' in answer.content
        first, second = answer.json()["dead_letters"]
        assert (first["task"]["id"], second["task"]["id"]) == ("a", "b")
        assert (first["reason"], first["attempt"], first["losses"]) == ("no", 1, 0)
        assert first["history"][0]["error"] == "why"
        rest = await api.get(url, params={"after": "b"})
        assert [letter["task"]["id"] for letter in rest.json()["dead_letters"]] == ["c"]
        assert (await api.get("/v1/queues/empty/dead-letters")).json() == {"dead_letters": []}

    @pytest.mark.parametrize("limit", ["0", "1001", "-1", "x", "1e3", "", "9" * 50, "٣"])
    async def test_bad_limits(self, api: httpx2.AsyncClient, limit: str) -> None:
        """Fault K4: a page size that is not a plain number within the bounds is refused."""
        answer = await api.get("/v1/queues/k/dead-letters", params={"limit": limit})
        problem(answer, 422, "invalid_input", "limit")

    async def test_redrive_and_discard(
        self, api: httpx2.AsyncClient, backend: MemoryBackend
    ) -> None:
        """Fault K6: redrive and discard are idempotent, and ignore ids of tasks that are not dead."""
        await bury(backend, "a", "b", "c", "d")
        url = "/v1/queues/k/dead-letters"
        some = {"ids": ["a", "nobody"]}
        assert (await api.post(f"{url}/redrive", json=some)).json() == {"count": 1}
        assert (await api.post(f"{url}/redrive", json=some)).json() == {"count": 0}
        assert (await api.post(f"{url}/discard", json={"ids": ["b"]})).json() == {"count": 1}
        assert (await api.post(f"{url}/redrive", json={"all": True})).json() == {"count": 2}
        problem(
            await api.post(f"{url}/discard", json={"all": True}), 422, "invalid_input", "confirm"
        )
        confirmed = f"{url}/discard?confirm=k"
        assert (await api.post(confirmed, json={"all": True})).json() == {"count": 0}
        ledger = await backend.control.ledger("k")
        assert (ledger.waiting, ledger.discarded, ledger.dead) == (3, 1, 0)

    @pytest.mark.parametrize(
        "body", [{}, {"ids": []}, {"all": False}, {"ids": ["a"], "all": True}, {"ids": ["a b"]}]
    )
    async def test_nothing_is_not_all(
        self, api: httpx2.AsyncClient, backend: MemoryBackend, body: Any
    ) -> None:
        """An empty request does not affect every dead letter: that needs ``"all": true``."""
        await bury(backend, "a")
        for verb in ("redrive", "discard"):
            answer = await api.post(f"/v1/queues/k/dead-letters/{verb}", json=body)
            assert answer.status_code == 422
        assert (await backend.control.ledger("k")).dead == 1


class TestServer:
    """Health, readiness, workers and maintenance."""

    async def test_health(
        self,
        api: httpx2.AsyncClient,
        backend: MemoryBackend,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Health shows the backend and its version; health and readiness turn to 503 if the store is unhealthy."""
        answer = await api.get("/health")
        assert answer.status_code == 200
        assert {"ok", "backend", "version", "details"} == set(answer.json())
        assert (await api.get("/ready")).json() == {"ready": True, "reason": "ok"}

        async def ill() -> Health:
            return Health(ok=False, backend="memory", details={"why": "x"})

        monkeypatch.setattr(backend, "health", ill)
        assert (await api.get("/health")).status_code == 503
        answer = await api.get("/ready")
        assert (answer.status_code, answer.json()["reason"]) == (503, "store")

    async def test_not_ready_before_the_start(self, backend: MemoryBackend) -> None:
        """Before its start the server is not ready, so that a load balancer sends no requests."""
        app = create_app(backend, settings())
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://[::1]:1") as client:
            answer = await client.get("/ready")
            assert (answer.status_code, answer.json()["reason"]) == (503, "starting")

    async def test_workers_and_maintain(
        self, api: httpx2.AsyncClient, backend: MemoryBackend
    ) -> None:
        """Law 10: maintenance can be requested over HTTP at any time."""
        backend.subscribe(["b", "a"], "w1")
        (worker,) = (await api.get("/v1/workers")).json()["workers"]
        assert (worker["worker_id"], worker["connections"]) == ("w1", 1)
        await backend.publisher.publish(Task(key="k", id="late", deadline=1.0))
        answer = await api.post("/v1/maintain")
        assert [one["task_id"] for one in answer.json()["expired"]] == ["late"]


class TestDoor:
    """Which requests the API accepts at all."""

    @pytest.mark.parametrize(
        ("host", "status"),
        [
            ("127.0.0.1", 200),
            ("127.0.0.1:8420", 200),
            ("127.8.9.10", 200),
            ("localhost:1", 200),
            ("LOCALHOST", 200),
            ("[::1]:8420", 200),
            ("evil.example", 421),
            ("127.0.0.1.evil.example", 421),
            ("localhost.evil.example", 421),
            ("127.0.0.1@evil.example", 421),
            ("0.0.0.0", 421),  # noqa: S104 - the test binds no address
            ("127.0.0.256", 421),
            ("192.168.0.1", 421),
            ("[::]", 421),
            ("", 421),
        ],
    )
    async def test_names_of_this_machine_only(
        self, api: httpx2.AsyncClient, host: str, status: int
    ) -> None:
        """A request with a foreign Host header is refused, which a web page would send after DNS rebinding."""
        answer = await api.get("/health", headers={"host": host})
        assert answer.status_code == status
        assert float(answer.headers["taskqueue-time"]) > 0

    @pytest.mark.parametrize(
        ("origin", "status"),
        [
            ("http://127.0.0.1:8420", 200),
            ("http://127.0.0.1:9999", 403),
            ("https://127.0.0.1:8420", 403),
            ("http://evil.example", 403),
            ("null", 403),
            ("", 403),
        ],
    )
    async def test_no_pages_of_other_sites(
        self, api: httpx2.AsyncClient, origin: str, status: int
    ) -> None:
        """A request from a web page is accepted only from the server's own origin, including scheme and port."""
        answer = await api.get("/v1/ledger", headers={"origin": origin})
        assert answer.status_code == status

    async def test_a_plugin_may_ask_for_tokens(self) -> None:
        """Fault K1: with an authentication plugin, a request needs a token (401) with the right (403).

        Public operations need no token.
        """

        def know(token: str) -> Identity | None:
            verbs = {"pub": {"publish"}, "adm": {"admin"}}.get(token)
            return None if verbs is None else Identity(name="n", verbs=frozenset(verbs))

        async with app_client(MemoryBackend(), know) as client:

            async def status(url: str, token: str | None = None) -> int:
                headers = {} if token is None else {"authorization": f"Bearer {token}"}
                return (await client.get(url, headers=headers)).status_code

            answer = await client.get("/v1/ledger")
            problem(answer, 401, "unauthenticated")
            assert answer.headers["www-authenticate"] == "Bearer"
            assert await status("/v1/ledger", "wrong") == 401
            assert await status("/v1/ledger", "pub") == 403
            assert await status("/v1/ledger", "adm") == 200
            assert await status("/v1/tasks/k/x", "pub") == 404
            assert await status("/health") == 200
            basic = {"authorization": "Basic adm"}
            assert (await client.get("/v1/ledger", headers=basic)).status_code == 401


class BrokenStore:
    """A store whose queues cannot be read."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    @property
    def queues(self) -> dict[str, object]:
        """Raise the error."""
        raise self._error


class TestErrors:
    """Errors are returned as problem documents without internal details."""

    async def test_unknown_paths_and_methods(self, api: httpx2.AsyncClient) -> None:
        """An unknown path and a wrong method return problem documents; the latter lists the allowed methods."""
        problem(await api.get("/v1/nowhere"), 404, "not_found")
        problem(await api.get("/v1"), 404, "not_found")
        problem(await api.get("/v1/tasks/"), 404, "not_found")
        answer = await api.post("/v1/queues/k/settings")
        problem(answer, 405, "method_not_allowed")
        assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD", "PUT", "PATCH", "DELETE"}
        assert "taskqueue-time" in answer.headers

    async def test_a_fault_of_ours_is_kept_in(
        self,
        api: httpx2.AsyncClient,
        backend: MemoryBackend,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """An internal error is logged with its traceback, and the response does not show the cause."""
        monkeypatch.setattr(backend.control, "_store", BrokenStore(ZeroDivisionError("s3cret")))
        problem(await api.get("/v1/queues"), 500, "internal")
        assert any(record.exc_info for record in caplog.records)

    async def test_an_outage(
        self, api: httpx2.AsyncClient, backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """If the store is unavailable, the response is 503 with Retry-After."""
        unavailable = BackendUnavailable("the store is unavailable")
        monkeypatch.setattr(backend.control, "_store", BrokenStore(unavailable))
        answer = await api.get("/v1/queues")
        problem(answer, 503, "backend_unavailable")
        assert answer.headers["retry-after"] == "1"

    async def test_head_is_get_without_a_body(self, api: httpx2.AsyncClient) -> None:
        """A HEAD request returns the headers of the GET request, for probes."""
        answer = await api.head("/health")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")

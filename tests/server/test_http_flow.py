"""Queue limits and pauses over HTTP: settings, pause operations, and responses to refused publishes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import pytest

from taskqueue_core.authoring.unsupported import field_checks
from taskqueue_core.backend import Capabilities
from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.confirmations import stored
from taskqueue_core.errors import QueueFull, SettingsConflict
from taskqueue_core.tasks import Confirmation, Published, Refusal, Task
from taskqueue_memory import MemoryBackend
from taskqueue_server.problems import problem_of
from tests.server.support import problem

_SETTINGS = "/v1/queues/k/settings"
_LIMITS: dict[str, Any] = {
    "capacity": 2,
    "max_inflight": 3,
    "rate_limit": {"max_tokens": 4, "interval": 5, "interval_unit": "MINUTES"},
    "paused": True,
    "intake_paused": True,
}


class TestSettings:
    """The settings of a queue as an HTTP resource."""

    async def test_limits_are_written_and_read(self, api: httpx2.AsyncClient) -> None:
        """Limits that were put are in force and appear in every view of the queue; unset limits are left out."""
        put = await api.put(_SETTINGS, json=_LIMITS)
        assert put.status_code == 200
        assert {name: put.json()[name] for name in _LIMITS} == _LIMITS
        assert (await api.get(_SETTINGS)).json() == put.json()
        assert (await api.get("/v1/queues/k")).json()["flow"] == _LIMITS
        await api.post("/v1/queues/other/pause")
        listed = (await api.get("/v1/queues")).json()["queues"]
        assert [one["flow"] for one in listed] == [_LIMITS, {"paused": True}]

    async def test_they_return_to_their_defaults(self, api: httpx2.AsyncClient) -> None:
        """Fault K6: resetting settings to their defaults requires the current version, and increases the version."""
        await api.put(_SETTINGS, json=_LIMITS)
        problem(await api.delete(_SETTINGS), 422, "invalid_input", "version")
        for version in ("0", "2"):
            told = await api.delete(_SETTINGS, params={"version": version})
            problem(told, 409, "settings_conflict")
        reset = await api.delete(_SETTINGS, params={"version": 1})
        assert reset.json() == QueueSettings(version=2).model_dump(mode="json")
        assert (await api.get(_SETTINGS)).json() == reset.json()
        assert (await api.get("/v1/queues/k")).json()["flow"] == {}

    async def test_a_patch_needs_no_version(self, api: httpx2.AsyncClient) -> None:
        """U3: PATCH is a JSON merge patch: it keeps what it omits, null resets, and a version is checked if given."""
        put = (await api.put(_SETTINGS, json=_LIMITS)).json()
        merge = {"content-type": "application/merge-patch+json"}
        body = b'{"max_inflight": null, "rate_limit": {"interval": 1.0}, "retry": {"base": 7}}'
        told = await api.patch(_SETTINGS, content=body, headers=merge)
        assert told.json() == put | {
            "version": 2,
            "max_inflight": None,
            "rate_limit": _LIMITS["rate_limit"] | {"interval": 1},
            "retry": put["retry"] | {"base": 7},
            "owners": put["owners"] | {"retry": "operator"},
        }
        problem(
            await api.patch(_SETTINGS, json={"version": 1, "paused": False}),
            409,
            "settings_conflict",
        )
        stale = await api.patch(_SETTINGS, json={"paused": False}, headers={"if-match": '"1"'})
        problem(stale, 412, "settings_conflict")
        problem(await api.patch(_SETTINGS, json={"capacity": 0}), 422, "invalid_input", "capacity")
        problem(await api.patch(_SETTINGS, json={"version": True}), 422, "invalid_input", "version")
        assert (await api.get(_SETTINGS)).json() == told.json()

    @pytest.mark.parametrize("version", ["", "-1", "x", "1e3", "9" * 30])
    async def test_bad_versions(self, api: httpx2.AsyncClient, version: str) -> None:
        """Fault K4: a version that is not a plain number is refused."""
        told = await api.delete(_SETTINGS, params={"version": version})
        problem(told, 422, "invalid_input", "version")

    async def test_order_and_bindings_are_written_and_read(self, api: httpx2.AsyncClient) -> None:
        """B12, D9: order and bindings are fields of the settings resource.

        The views of a queue show each field that is not at its default.
        """
        given: dict[str, Any] = {
            "order": "fair",
            "weights": {"a": 3, "b": 2},
            "paused_tenants": ["a", "c"],
            "tenant_capacity": 5,
            "tenant_max_inflight": 6,
            "tenant_rate_limit": _LIMITS["rate_limit"],
            "floor_share": 0.25,
            "max_processing_time": 1.5,
            "moved_to": "elsewhere",
            "bound_to": ["k", "other"],
        }
        put = await api.put(_SETTINGS, json=given)
        assert put.status_code == 200, put.text
        assert {name: put.json()[name] for name in given} == given
        shown = (await api.get("/v1/queues/k")).json()["flow"]
        assert shown.pop("weighted") == len(given.pop("weights"))
        assert shown.pop("paused_tenants") == len(given.pop("paused_tenants"))
        assert shown == given
        document = (await api.get("/v1/openapi.json")).json()["components"]["schemas"]
        assert given.keys() <= document["QueueSettings"]["properties"].keys()
        assert shown.keys() <= document["FlowOut"]["properties"].keys()

    @pytest.mark.parametrize(
        ("settings", "field"),
        [
            ({"weights": {"a": 2}}, "weights"),
            ({"tenant_capacity": 2, "order": "fifo"}, "tenant_capacity"),
            ({"bound_to": ["a/b"]}, "bound_to"),
            ({"moved_to": ""}, "moved_to"),
            ({"order": "lifo"}, "order"),
            ({"tenant_rate_limit": {}}, "tenant_rate_limit.max_tokens"),
        ],
    )
    async def test_bad_settings(
        self, api: httpx2.AsyncClient, settings: dict[str, Any], field: str
    ) -> None:
        """Fault K4: the error names the invalid field, also if it is invalid only in combination with another field."""
        problem(await api.put(_SETTINGS, json=settings), 422, "invalid_input", field)


class TestPausing:
    """The two pauses of a queue, of delivery and of intake, and the operations that set and end them."""

    async def test_nothing_is_delivered(
        self, api: httpx2.AsyncClient, backend: MemoryBackend
    ) -> None:
        """F6, F7, OPEN-F1: while a queue is paused, a receive returns nothing without an error.

        Publishing continues, and after the resume the task is delivered.
        """
        subscription = backend.subscribe(["k"], "w")
        paused = await api.post("/v1/queues/k/pause")
        assert (paused.json()["paused"], paused.json()["version"]) == (True, 1)
        assert (await api.post("/v1/tasks", json={"key": "k"})).status_code == 201
        assert (await subscription.receive(1, 0)).deliveries == ()
        assert (await api.post("/v1/queues/k/pause")).json() == paused.json()
        resumed = await api.post("/v1/queues/k/resume", params={"intake": "false"})
        assert (resumed.json()["paused"], resumed.json()["version"]) == (False, 2)
        assert len((await subscription.receive(1, 0)).deliveries) == 1

    async def test_nothing_is_taken_in(
        self, api: httpx2.AsyncClient, backend: MemoryBackend
    ) -> None:
        """B13: while the intake is paused, a publish gets 503 with the reason and Retry-After.

        Tasks that were published before are still delivered.
        """
        await api.post("/v1/tasks", json={"key": "k", "id": "before"})
        paused = await api.post("/v1/queues/k/pause", params={"intake": "true"})
        assert (paused.json()["intake_paused"], paused.json()["paused"]) == (True, False)
        answer = await api.post("/v1/tasks", json={"key": "k", "id": "a"})
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        told = answer.json()
        assert (told["status"], told["code"]) == ("refused", "intake_paused")
        assert told["reason"]
        again = await api.post("/v1/tasks", json={"key": "k", "id": "before"})
        assert (again.status_code, again.json()["status"]) == (200, "duplicate")
        assert len((await backend.subscribe(["k"], "w").receive(5, 0)).deliveries) == 1
        await api.post("/v1/queues/k/resume", params={"intake": "true"})
        assert (await api.post("/v1/tasks", json={"key": "k", "id": "a"})).status_code == 201

    async def test_one_tenant(self, api: httpx2.AsyncClient, backend: MemoryBackend) -> None:
        """OPEN-F1, U21: one tenant is paused and resumed, and two operators who do so at once do not lose a change."""
        await api.patch(_SETTINGS, json={"order": "fair"})
        pause, resume = "/v1/queues/k/pause", "/v1/queues/k/resume"
        both = (api.post(pause, params={"tenant": name}) for name in ("acme", "beta"))
        for answer in await asyncio.gather(*both):
            assert answer.status_code == 200, answer.text
        tasks = [Task(key="k", id=name, tenant=name) for name in ("acme", "beta", "other")]
        await backend.publisher.publish(*tasks)
        subscription = backend.subscribe(["k"], "w")
        received = await subscription.receive(9, 0)
        assert [delivery.task.id for delivery in received.deliveries] == ["other"]
        told = (await api.post(resume, params={"tenant": "acme"})).json()
        assert told["paused_tenants"] == ["beta"]
        assert told == (await api.post(resume, params={"tenant": "acme"})).json()
        received = await subscription.receive(9, 0)
        assert [delivery.task.id for delivery in received.deliveries] == ["acme"]
        actions = [(entry.action, entry.details) for entry in await backend.audit.entries(limit=2)]
        assert actions == [("resume tenant", "tenant=acme")] * 2
        for params in ({"tenant": "a", "intake": "true"}, {"tenant": "a/b"}, {"tenant": ""}):
            problem(await api.post(pause, params=params), 422, "invalid_input", "tenant")
        fifo = await api.post("/v1/queues/other/pause", params={"tenant": "acme"})
        problem(fifo, 422, "invalid_input", "tenant")
        many = [f"t{n}" for n in range(1000)]
        await api.patch(_SETTINGS, json={"paused_tenants": many})
        full = await api.post(pause, params={"tenant": "acme"})
        problem(full, 422, "invalid_input", "paused_tenants")

    @pytest.mark.parametrize("word", ["", "1", "yes", "True"])
    async def test_bad_words(self, api: httpx2.AsyncClient, word: str) -> None:
        """Fault K4: a value of ``intake`` other than true or false is refused, so that the wrong pause is never set."""
        told = await api.post("/v1/queues/k/pause", params={"intake": word})
        problem(told, 422, "invalid_input", "intake")
        assert (await api.get(_SETTINGS)).json()["version"] == 0

    @pytest.mark.fast_clock
    async def test_side_by_side(
        self, api: httpx2.AsyncClient, backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Fault K6: a pause retries after a concurrent change of the settings and keeps that change.

        If the conflicts never end, the response is 409.
        """
        right = backend.control.configure
        conflicts = 2

        async def quarrel(key: str, settings: QueueSettings) -> QueueSettings:
            nonlocal conflicts
            if conflicts:
                conflicts -= 1
                await right(key, settings.model_copy(update={"paused": False, "capacity": 7}))
                raise SettingsConflict("somebody was quicker")
            return await right(key, settings)

        monkeypatch.setattr(backend.control, "configure", quarrel)
        told = (await api.post("/v1/queues/k/pause")).json()
        assert (told["version"], told["paused"], told["capacity"]) == (3, True, 7)
        await api.post("/v1/queues/k/resume")
        conflicts = 1000
        problem(await api.post("/v1/queues/k/pause"), 409, "settings_conflict")


class TestFullQueue:
    """B13: the response to a publish on a full queue."""

    async def test_one_task(self, api: httpx2.AsyncClient) -> None:
        """B13: a publish to a full queue gets 429 with the reason, the depth of the queue and Retry-After."""
        await api.put(_SETTINGS, json={"capacity": 1})
        await api.post("/v1/tasks", json={"key": "k", "id": "a"})
        answer = await api.post("/v1/tasks", json={"key": "k", "id": "b"})
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        told = answer.json()
        assert (told["status"], told["code"], told["depth"]) == ("refused", "queue_full", 1)
        assert told["reason"]
        assert told["retry_after"] > 0
        assert (await api.post("/v1/tasks", json={"key": "k", "id": "a"})).status_code == 200
        assert (await api.get("/v1/queues/k/ledger")).json()["published"] == 1

    async def test_a_batch(self, api: httpx2.AsyncClient, backend: MemoryBackend) -> None:
        """B13: each task of a batch gets its own result.

        Tasks that fit, or that go to another queue, are accepted although other tasks are refused.
        """
        await api.put(_SETTINGS, json={"capacity": 2})
        await backend.publisher.publish(Task(key="k", id="known"))
        keys = {"new": "k", "beyond": "k", "elsewhere": "other", "known": "k"}
        lines = "\n".join(json.dumps({"key": key, "id": name}) for name, key in keys.items())
        answer = await api.post(
            "/v1/tasks/batch", content=lines, headers={"content-type": "application/x-ndjson"}
        )
        assert answer.status_code == 200
        told = [json.loads(line) for line in answer.text.splitlines()]
        statuses = ["accepted", "refused", "accepted", "duplicate"]
        assert [one["status"] for one in told] == statuses
        assert (told[1]["code"], told[1]["depth"]) == ("queue_full", 2)
        assert told[1]["retry_after"] > 0


class TestRefusals:
    """Each reason for a refusal has its own HTTP status."""

    @pytest.mark.parametrize(
        ("code", "status"),
        [
            (Refusal.QUEUE_FULL, 429),
            (Refusal.TENANT_FULL, 429),
            (None, 429),
            (Refusal.INTAKE_PAUSED, 503),
            (Refusal.STORE_FULL, 503),
            (Refusal.MOVED, 409),
        ],
    )
    async def test_statuses(
        self,
        api: httpx2.AsyncClient,
        backend: MemoryBackend,
        monkeypatch: pytest.MonkeyPatch,
        code: Refusal | None,
        status: int,
    ) -> None:
        """B13, A20: a temporary refusal has Retry-After; the refusal of a queue that has moved does not."""
        hint = None if code is Refusal.MOVED else 2.5
        refused = Confirmation(
            key="k", task_id="a", status=Published.REFUSED, code=code, reason="r", retry_after=hint
        )

        async def publish(*_: Task) -> tuple[Confirmation, ...]:
            return (refused,)

        monkeypatch.setattr(backend.publisher, "publish", publish)
        answer = await api.post("/v1/tasks", json={"key": "k", "id": "a"})
        assert answer.status_code == status
        assert answer.headers.get("retry-after") == (None if hint is None else "3")
        told = answer.json()
        assert (told.get("code"), told["reason"], told.get("retry_after")) == (code, "r", hint)
        with pytest.raises(QueueFull) as caught:
            stored(refused)
        error = problem_of(caught.value)
        assert (error.problem.status, "retry-after" in error.headers) == (status, hint is not None)

    async def test_an_ordering_key_without_order(
        self, api: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """R8: a task with an ordering key is refused if the store cannot keep the order.

        The other lines of the batch are accepted.
        """
        checks = field_checks(Capabilities())
        monkeypatch.setattr("taskqueue_server.api.batch.field_checks", lambda _: checks)
        lines = '{"key":"k","id":"a","ordering_key":"e"}\n{"key":"k","id":"b"}'
        kind = {"content-type": "application/x-ndjson"}
        answer = await api.post("/v1/tasks/batch", content=lines, headers=kind)
        first, second = map(json.loads, answer.text.splitlines())
        assert (first["status"], first["field"]) == ("invalid", "ordering_key")
        assert second["status"] == "accepted"

"""Publishing, retrying and looking up tasks over HTTP."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.errors import BackendUnavailable, PublishUnconfirmed
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import State, Task
from taskqueue_memory import MemoryBackend
from tests.server.support import PROBLEM, problem


class TestPublishing:
    """D1: a publish is answered only after the store has confirmed it."""

    async def test_accepted_duplicate_conflict(self, api: httpx2.AsyncClient) -> None:
        """Law 7: publishing an id again with the same payload is a duplicate, and with another payload a conflict."""
        first = await api.post("/v1/tasks", json={"key": "k", "id": "a", "payload": {"x": 1}})
        assert first.status_code == 201
        assert first.json() == {"key": "k", "task_id": "a", "status": "accepted", "position": 0}
        again = await api.post("/v1/tasks", json={"key": "k", "id": "a", "payload": {"x": 1}})
        assert (again.status_code, again.json()["status"]) == (200, "duplicate")
        other = await api.post("/v1/tasks", json={"key": "k", "id": "a", "payload": {"x": 2}})
        assert (other.status_code, other.json()["status"]) == (409, "conflict")

    async def test_an_id_is_made_where_none_is_given(self, api: httpx2.AsyncClient) -> None:
        """If a task has no id, the server generates one and returns it in the response."""
        answer = await api.post("/v1/tasks", json={"key": "k"})
        assert len(answer.json()["task_id"]) == 32

    @pytest.mark.fast_clock
    @pytest.mark.parametrize(
        ("error", "code", "calls"),
        [
            (PublishUnconfirmed("lost"), "publish_unconfirmed", 4),
            (BackendUnavailable("away"), "backend_unavailable", 1),
        ],
    )
    async def test_what_is_not_confirmed_is_not_claimed(
        self,
        api: httpx2.AsyncClient,
        backend: MemoryBackend,
        monkeypatch: pytest.MonkeyPatch,
        error: Exception,
        code: str,
        calls: int,
    ) -> None:
        """D1 and fault E1: if the store does not confirm a publish, the response is 503 with Retry-After.

        The error code says whether the task may have been stored.
        """
        made = []

        async def silent(*_: Task) -> None:
            made.append(1)
            raise error

        monkeypatch.setattr(backend.publisher, "publish", silent)
        answer = await api.post("/v1/tasks", json={"key": "k", "id": "a"})
        problem(answer, 503, code)
        assert answer.headers["retry-after"] == "1"
        assert len(made) == calls

    async def test_every_field_arrives(
        self, api: httpx2.AsyncClient, backend: MemoryBackend
    ) -> None:
        """Every field of a task reaches the store, and the bytes of the payload are stored unchanged."""
        fields = {
            "headers": {"a": "b"},
            "priority": 9,
            "tenant": "t",
            "ordering_key": "o",
            "max_attempts": 3,
            "deadline": 5e9,
            "tags": ("user:42", "nightly"),
        }
        body = b'{"key":"k","id":"a","payload": {"z": 1.50,  "a":[ ]}}'
        assert (
            await api.post(
                "/v1/tasks",
                content=body,
                headers={"content-type": "application/json; charset=utf-8"},
            )
        ).status_code == 201
        await api.post("/v1/tasks", json={"key": "k", "id": "b", **fields})
        subscription = backend.subscribe(["k"], "w")
        first, second = (await subscription.receive(2, 0)).deliveries
        tasks = {delivery.task.id: delivery.task for delivery in (first, second)}
        assert tasks["a"].payload == b'{"z": 1.50,  "a":[ ]}'
        for name, value in fields.items():
            assert getattr(tasks["b"], name) == value

    async def test_seconds_from_now_are_counted_by_the_stores_clock(
        self, api: httpx2.AsyncClient, backend: MemoryBackend
    ) -> None:
        """A delay counts from the clock of the store, so that the clock of the client does not matter."""
        now = backend.now()
        await api.post("/v1/tasks", json={"key": "k", "id": "a", "delay": 100, "expires_in": 200})
        (status,) = await backend.control.statuses("k", "a")
        assert status is not None
        assert status.state is State.SCHEDULED
        answer = await api.get("/v1/ledger")
        assert abs(float(answer.headers["taskqueue-time"]) - now) < 5

    @pytest.mark.parametrize(
        ("fields", "field"),
        [
            ({"key": ""}, "key"),
            ({"key": "x" * 201}, "key"),
            ({"key": "ключ"}, "key"),
            ({"key": "{a}{b}"}, "key"),
            ({"key": "*"}, "key"),
            ({"key": ".."}, "key"),
            ({"key": "a\r\nb"}, "key"),
            ({"key": "a\u0000"}, "key"),
            ({"key": 7}, "key"),
            ({"id": "a b"}, "id"),
            ({"id": "x" * 10_000}, "id"),
            ({"tenant": "\u001b[2J"}, "tenant"),
            ({"ordering_key": ""}, "ordering_key"),
            ({"priority": 10}, "priority"),
            ({"priority": -1}, "priority"),
            ({"priority": 1.5}, "priority"),
            ({"priority": True}, "priority"),
            ({"max_attempts": 0}, "max_attempts"),
            ({"max_attempts": 10**9}, "max_attempts"),
            ({"delay": -1}, "delay"),
            ({"delay": 1e308}, "delay"),
            ({"delay": 1, "not_before": 1}, "delay"),
            ({"expires_in": 1, "deadline": 1}, "expires_in"),
            ({"deadline": 253402300800}, "deadline"),
            ({"deadline": -1}, "deadline"),
            ({"not_before": "soon"}, "not_before"),
            ({"headers": {"a": 1}}, "headers[...]"),
            ({"headers": {"a": "b\n"}}, "headers"),
            ({"headers": {str(n): "" for n in range(33)}}, "headers"),
            ({"headers": {"a": "x" * 9000}}, "headers"),
            ({"tags": ["a-tag"] * 2}, "tags"),
            ({"prioritty": 1}, "prioritty"),
        ],
        ids=str,
    )
    async def test_bad_fields_are_named(
        self, api: httpx2.AsyncClient, backend: MemoryBackend, fields: Any, field: str
    ) -> None:
        """Faults K2 and K4: an invalid field is refused by name, its value is not repeated, and nothing is stored."""
        answer = await api.post("/v1/tasks", json={"key": "k", **fields})
        body = problem(answer, 422, "invalid_input", field)
        assert len(body["detail"]) < 400
        for value in fields.values():
            assert not isinstance(value, str) or len(value) < 3 or value not in answer.text
        assert (await backend.control.ledger("k")).published == 0

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"{",
            b"\xff\xfe",
            b'{"key":"k","payload":NaN}',
            b'{"key":"k","payload":"\xff"}',
            b'{"key":"k","payload":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
            b'{"key":"k","priority":' + b"1" * 5000 + b"}",
        ],
        ids=["empty", "open", "utf16", "nan", "utf8", "deep", "digits"],
    )
    async def test_what_is_not_json_is_refused(self, api: httpx2.AsyncClient, body: bytes) -> None:
        """Fault K3: a body that is not valid JSON is refused with a problem document."""
        answer = await api.post(
            "/v1/tasks", content=body, headers={"content-type": "application/json"}
        )
        assert answer.status_code in (400, 422)
        assert answer.headers["content-type"] == PROBLEM

    async def test_a_payload_may_have_its_limit_and_no_more(self, api: httpx2.AsyncClient) -> None:
        """Fault K3: a payload of the maximum size is accepted, and one byte more is refused."""
        fits = "x" * (LIMITS.payload - 2)
        assert (await api.post("/v1/tasks", json={"key": "k", "payload": fits})).status_code == 201
        answer = await api.post("/v1/tasks", json={"key": "k", "payload": fits + "x"})
        problem(answer, 413, "too_large", "payload")
        assert "limit payload" in answer.json()["detail"]

    async def test_an_unknown_name_is_not_repeated(self, api: httpx2.AsyncClient) -> None:
        """The error about an unknown field repeats its name only if it looks like a field name."""
        answer = await api.post("/v1/tasks", json={"key": "k", "s3cret <b>": 1})
        problem(answer, 422, "invalid_input")
        assert "s3cret" not in answer.text


class TestRetries:
    """REV-E2: scheduling a retry that another system has decided on."""

    async def test_after_the_end_it_is_a_new_attempt(
        self, api: httpx2.AsyncClient, backend: MemoryBackend
    ) -> None:
        """REV-E2 and fault F11: a retry of a task that was already acknowledged starts a new attempt."""
        await api.post("/v1/tasks", json={"key": "k", "id": "a"})
        subscription = backend.subscribe(["k"], "w")
        (delivery,) = (await subscription.receive(1, 0)).deliveries
        await subscription.ack(delivery)
        body = {"task": {"key": "k", "id": "a"}, "delay": 0, "error": "e", "token": "run 7"}
        answer = await api.post("/v1/retries", json=body)
        assert (answer.status_code, answer.json()["status"]) == (201, "accepted")
        again = await api.post("/v1/retries", json=body)
        assert (again.status_code, again.json()["status"]) == (200, "duplicate")
        (delivery,) = (await subscription.receive(1, 1)).deliveries
        assert delivery.attempt == 2

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"task": {"key": "k"}, "delay": 1}, "task.id"),
            ({}, "at"),
            ({"at": 1, "delay": 1}, "delay"),
            ({"delay": -1}, "delay"),
            ({"delay": 1e300}, "delay"),
            ({"at": 1e18}, "at"),
            ({"delay": 1, "token": ""}, "token"),
            ({"delay": 1, "token": "\n"}, "token"),
            ({"delay": 1, "task": {"key": "k", "id": "a", "x": 1}}, "task.x"),
        ],
        ids=str,
    )
    async def test_bad_ones_are_named(
        self, api: httpx2.AsyncClient, change: dict[str, Any], field: str
    ) -> None:
        """Fault K4: a retry with an invalid time, token or task is refused with the name of the field."""
        body = {"task": {"key": "k", "id": "a"}, **change}
        problem(await api.post("/v1/retries", json=body), 422, "invalid_input", field)

    async def test_an_unknown_task_is_published(
        self, api: httpx2.AsyncClient, backend: MemoryBackend
    ) -> None:
        """Law 6: a retry passes no limit with a task that the store does not know; a known task needs no room."""

        async def retry(task_id: str, key: str = "k") -> tuple[int, str]:
            body = {"task": {"key": key, "id": task_id}, "delay": 60, "token": "run 7"}
            answered = await api.post("/v1/retries", json=body)
            return answered.status_code, answered.json().get("code", answered.json()["status"])

        await backend.control.configure("k", QueueSettings(capacity=1))
        assert await retry("a") == (201, "accepted")
        assert await retry("a") == (200, "duplicate")
        assert await retry("b") == (429, "queue_full")
        path = "/v1/tasks/k/b/retry"
        assert (await api.post(path, json={"payload": 1})).status_code == 429
        await backend.control.configure("k", QueueSettings(version=1, intake_paused=True))
        assert await retry("b") == (503, "intake_paused")
        assert (await backend.control.ledger("k")).published == 1
        await backend.control.configure("all", QueueSettings(bound_to=("k", "other")))
        assert await retry("c", "all") == (503, "intake_paused")
        await backend.control.configure("k", QueueSettings(version=2))
        assert await retry("c", "all") == (201, "accepted")
        await api.post("/v1/tasks", json={"key": "other", "id": "d"})
        assert await retry("d", "other") == (200, "duplicate"), (
            "a retry must not make room for a publish"
        )
        assert (await backend.control.ledger("other")).scheduled == 1
        assert (await backend.control.ledger("other")).waiting == 1

    async def test_a_long_error_is_cut(
        self, api: httpx2.AsyncClient, backend: MemoryBackend
    ) -> None:
        """An error text that is too long is cut to the limit."""
        await api.post("/v1/tasks", json={"key": "k", "id": "a"})
        await backend.subscribe(["k"], "w").receive(1, 0)
        body = {"task": {"key": "k", "id": "a"}, "delay": 9, "error": "e" * 10_000}
        assert (await api.post("/v1/retries", json=body)).status_code == 201
        (status,) = await backend.control.statuses("k", "a")
        assert status is not None
        assert status.error is not None
        assert len(status.error) == LIMITS.text


class TestLookingUp:
    """Looking up the status and the result of a task, and cancelling it."""

    async def test_status_and_result(self, api: httpx2.AsyncClient, backend: MemoryBackend) -> None:
        """Percent-encoded keys and ids in a path are decoded, and a result is returned byte for byte."""
        await api.post("/v1/tasks", json={"key": "k:1", "id": "a@b"})
        answer = await api.get("/v1/tasks/k%3A1/a%40b")
        assert answer.json()["state"] == "waiting"
        problem(await api.get("/v1/tasks/k%3A1/a%40b/result"), 404, "no_result")
        subscription = backend.subscribe(["k:1"], "w")
        (delivery,) = (await subscription.receive(1, 0)).deliveries
        await subscription.ack(delivery, results=[b'{"z": 1.0}'])
        result = await api.get("/v1/tasks/k%3A1/a%40b/result")
        assert result.content == b'{"z": 1.0}'
        assert result.headers["content-type"] == "application/json"

    async def test_unknown_and_impossible_names(self, api: httpx2.AsyncClient) -> None:
        """Fault K2: keys and ids in paths are validated like those in bodies."""
        problem(await api.get("/v1/tasks/k/nobody"), 404, "unknown_task")
        problem(await api.get("/v1/tasks/%7Bk%7D/a"), 422, "invalid_input", "key")
        problem(await api.get("/v1/tasks/k/%0d%0a"), 422, "invalid_input", "id")
        problem(await api.get("/v1/tasks/k/%2E%2E"), 422, "invalid_input", "id")
        problem(await api.get("/v1/tasks/k/a%2Fb"), 404, "not_found")

    async def test_cancel(self, api: httpx2.AsyncClient) -> None:
        """The response to a cancel says whether the task was cancelled by this request."""
        await api.post("/v1/tasks", json={"key": "k", "id": "a"})
        assert (await api.delete("/v1/tasks/k/a")).json() == {"cancelled": True}
        assert (await api.delete("/v1/tasks/k/a")).json() == {"cancelled": False}
        assert (await api.get("/v1/tasks/k/a")).json()["state"] == "cancelled"

    async def test_reschedule(self, api: httpx2.AsyncClient, backend: MemoryBackend) -> None:
        """A waiting task gets the time or the delay of the request; the response says whether it has it now (U6)."""
        await api.post("/v1/tasks", json={"key": "k", "id": "a"})
        target = "/v1/tasks/k/a/reschedule"
        assert (await api.post(target, json={"delay": 60})).json() == {"rescheduled": True}
        assert (await api.get("/v1/tasks/k/a")).json()["state"] == "scheduled"
        assert (await api.post(target, json={"at": 1})).json() == {"rescheduled": True}
        assert (await backend.subscribe(["k"], "w").receive(1, 0)).deliveries
        assert (await api.post(target, json={"delay": 60})).json() == {"rescheduled": False}
        unknown = await api.post("/v1/tasks/k/x/reschedule", json={"delay": 60})
        assert unknown.json() == {"rescheduled": False}
        problem(await api.post(target, json={}), 422, "invalid_input", "at")
        problem(await api.post(target, json={"at": 1, "delay": 1}), 422, "invalid_input", "delay")
        problem(await api.post(target, json={"delay": -1}), 422, "invalid_input", "delay")

    async def test_many_at_once(self, api: httpx2.AsyncClient, backend: MemoryBackend) -> None:
        """For many ids at once, an unknown id is null among the statuses and missing among the results.

        The results are returned byte for byte.
        """
        await backend.publisher.publish(*(Task(key="k", id=i) for i in "abc"))
        subscription = backend.subscribe(["k"], "w")
        first, second = (await subscription.receive(2, 0)).deliveries
        await subscription.ack(first, second, results=[b"[1,  2]", None])
        ids = {"ids": ["a", "b", "c", "x", "a"]}
        statuses = (await api.post("/v1/queues/k/statuses", json=ids)).json()["statuses"]
        assert {i: s and s["state"] for i, s in statuses.items()} == {
            "a": "done",
            "b": "done",
            "c": "waiting",
            "x": None,
        }
        assert (await api.post("/v1/queues/k/results", json=ids)).content == (
            b'{"results":{"a":[1,  2]}}'
        )
        for kind in ("statuses", "results"):
            assert (await api.post(f"/v1/queues/k/{kind}", json={"ids": []})).json() == {kind: {}}

    async def test_bytes_of_results(
        self, api: httpx2.AsyncClient, backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Row A5: results that exceed `Limits.body` in total are refused, and are not all read for that."""
        count = 4 * LIMITS.body // LIMITS.result
        ids = [f"t{n}" for n in range(count)]
        await backend.publisher.publish(*(Task(key="k", id=i) for i in ids))
        async with backend.subscribe(["k"], "w") as subscription:
            taken = (await subscription.receive(count, 0)).deliveries
            large = b'"' + b"x" * (LIMITS.result - 2) + b'"'
            await subscription.ack(*taken, results=[large] * count)
        read: list[str] = []
        results = backend.control.results

        async def counted(key: str, *task_ids: str) -> tuple[bytes | None, ...]:
            read.extend(task_ids)
            return await results(key, *task_ids)

        monkeypatch.setattr(backend.control, "results", counted)
        answer = await api.post("/v1/queues/k/results", json={"ids": ids})
        problem(answer, 413, "too_large", "ids")
        assert "limit body" in answer.json()["detail"]
        assert len(read) <= count // 2
        fits = {"ids": ids[: count // 4]}
        assert len((await api.post("/v1/queues/k/results", json=fits)).json()["results"]) == 64

    async def test_bytes_of_statuses(self, api: httpx2.AsyncClient, backend: MemoryBackend) -> None:
        """Statuses that exceed `Limits.body` in total, because of long errors and tracebacks, are refused (U10)."""
        await backend.publisher.publish(*(Task(key="k", id=f"t{n}") for n in range(700)))
        async with backend.subscribe(["k"], "w") as subscription:
            error, traceback = "\u9000" * LIMITS.text, "x" * LIMITS.traceback
            for one in (await subscription.receive(700, 0)).deliveries:
                await subscription.dead_letter(one, "no", error, traceback)
        ids = [f"t{n}" for n in range(LIMITS.batch)]
        answer = await api.post("/v1/queues/k/statuses", json={"ids": ids})
        assert answer.status_code == 200
        await backend.publisher.publish(*(Task(key="k", id=f"t{n}") for n in range(700, 1000)))
        async with backend.subscribe(["k"], "w") as subscription:
            for one in (await subscription.receive(300, 0)).deliveries:
                await subscription.dead_letter(one, "no", error, traceback)
        problem(await api.post("/v1/queues/k/statuses", json={"ids": ids}), 413, "too_large", "ids")

    @pytest.mark.parametrize("kind", ["statuses", "results"])
    async def test_so_many_ids_and_no_more(self, api: httpx2.AsyncClient, kind: str) -> None:
        """A lookup of the maximum number of ids is accepted; one id more is refused."""
        ids = [f"t{n}" for n in range(LIMITS.batch + 1)]
        url = f"/v1/queues/k/{kind}"
        assert (await api.post(url, json={"ids": ids[:-1]})).status_code == 200
        problem(await api.post(url, json={"ids": ids}), 422, "invalid_input", "ids")
        problem(await api.post(url, json={"ids": ["a", "b c"]}), 422, "invalid_input", "ids")
        problem(await api.post(url, json={"ids": "a"}), 422, "invalid_input", "ids")
        problem(await api.post(url, json={}), 422, "invalid_input")

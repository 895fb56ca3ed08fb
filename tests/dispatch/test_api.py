"""Tests of the dispatcher's HTTP API, with a real server and simulated GPU servers, on memory and Redis."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import control_of
from taskqueue_dispatch.gpu_server.simulator import Mode, SimulatedGpu
from taskqueue_dispatch.models import ModelConfig
from taskqueue_dispatch.names import queue_of
from taskqueue_server.context.waiters import MAX_WAIT
from tests.dispatch.api import Api, serving
from tests.dispatch.patience import PATIENCE, until
from tests.dispatch.support import Gate, ledger_of
from tests.dispatch.test_status import bury_elsewhere
from tests.server.support import problem


class TestSubmit:
    """A submission has three possible outcomes; with the first two the job is stored before the answer is sent."""

    async def test_the_three_outcomes(self, backend: Backend) -> None:
        """A job is leased, queued with its position, or refused with a reason (C6, B4, B9, B13, OPEN-A2)."""
        async with serving(backend) as api, SimulatedGpu(name="a", mode=Mode.HANG) as gpu:
            path = "/admin/model-configs/zimg"
            assert (await api.client.put(path, json={"queue_per_slot": 2})).status_code == 200
            answer = await api.client.post("/queue/submit", json={"model": "zimg"})
            told = problem(answer, 503, "no_slots")
            assert told["reason"] == "no_endpoints"
            assert int(answer.headers["retry-after"]) >= 1
            gpu.mode = Mode.OK
            await api.register("zimg", gpu)
            gpu.mode = Mode.HANG
            answer = await api.client.post("/queue/submit", json={"model": "zimg"})
            first = answer.json()
            assert answer.status_code == 202
            assert first == {"outcome": "leased", "job_id": first["job_id"], "server": None}
            await until(lambda: gpu.posts == 1)
            for place in range(2):
                answer = await api.client.post("/queue/submit", json={"model": "zimg"})
                told = answer.json()
                assert answer.status_code == 202
                assert told == {
                    "outcome": "queued",
                    "job_id": told["job_id"],
                    "position": place,
                    "estimated_wait": None,
                }
            answer = await api.client.post("/queue/submit", json={"model": "zimg"})
            assert problem(answer, 503, "no_slots")["reason"] == "queue_full"
            assert int(answer.headers["retry-after"]) >= 1
            assert (await ledger_of(backend, "zimg")).waiting == 2

    async def test_the_payload_goes_through_byte_for_byte(self, backend: Backend) -> None:
        """The GPU server receives the payload byte for byte, with unchanged numbers, spaces and order (C6, law 4)."""
        payload = b'{"z" : 1.10, "a":[1e400, 12345678901234567890123],  "\\u00e9":"\xc3\xa9"}'
        got: asyncio.Queue[bytes] = asyncio.Queue()

        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            size = int(head.partition(b"content-length: ")[2].partition(b"\r")[0])
            got.put_nowait(head + await reader.readexactly(size))
            answer = b'{"status":"success","result":1}'
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
            writer.write(b"content-length: %d\r\nconnection: close\r\n\r\n" % len(answer) + answer)
            await writer.drain()
            writer.close()

        async with serving(backend) as api, await asyncio.start_server(take, "127.0.0.1") as gpu:
            host, port = gpu.sockets[0].getsockname()
            await api.dispatcher.registry.register(
                "zimg", "raw", f"http://{host}:{port}/", 1, reports=False
            )
            answer = await api.client.post(
                "/queue/submit",
                content=b'{"payload":' + payload + b', "model": "zimg"}',
                headers={"content-type": "application/json"},
            )
            job_id = answer.json()["job_id"]
            sent = await asyncio.wait_for(got.get(), PATIENCE)
            head, _, body = sent.partition(b"\r\n\r\n")
            assert body == payload
            assert b"idempotency-key: " + job_id.encode() in head
            assert b"x-source: dispatcher" in head
            assert (await api.state(job_id, wait=30))["state"] == "done"

    async def test_a_job_and_its_result(self, backend: Backend) -> None:
        """A request for a result waits for the job's end, and returns the GPU server's result (C1, C6, C7, C26)."""
        gate = Gate()
        async with serving(backend) as api, SimulatedGpu(name="gpu-1", handler=gate) as gpu:
            await api.register("zimg", gpu)
            job_id = await api.submit("zimg", {"prompt": "a boat"})
            await until(lambda: gpu.active == 1)
            told = await api.state(job_id)
            assert (told["state"], told["attempt"], told["server"]) == ("running", 1, "gpu-1")
            missing = await api.client.get(f"/queue/jobs/{job_id}/result")
            problem(missing, 404, "no_result")
            where = f"/queue/jobs/{job_id}/result?wait={MAX_WAIT}"
            asking = asyncio.create_task(api.client.get(where, timeout=60))
            await until(lambda: len(api.context.waiters) == 1)
            gate.open()
            answer = await asyncio.wait_for(
                asking, MAX_WAIT - 5
            )  # the answer comes when the job ends, before the wait is over
            told = await api.state(job_id)
            assert (told["state"], told["callback"]) == ("done", None)
            assert (answer.status_code, answer.content) == (200, b"null")
            assert gpu.runs[job_id] == 1

    async def test_again_with_the_same_key(self, backend: Backend) -> None:
        """Submitting the same key again, in the body or in the header, returns the same job.

        Another payload with the same key is refused (OPEN-C1).
        """
        async with serving(backend) as api, SimulatedGpu(name="a", latency=0.01) as gpu:
            await api.register("zimg", gpu)
            same = [await api.submit("zimg", 1, idempotency_key="order-1") for _ in range(3)]
            assert len(set(same)) == 1
            other = {"model": "zimg", "payload": 2, "idempotency_key": "order-1"}
            problem(await api.client.post("/queue/submit", json=other), 409, "id_conflict")

            async def post(payload: int, key: str = '"order 2"', **fields: Any) -> Any:
                told = {"model": "zimg", "payload": payload, **fields}
                headers = {"idempotency-key": key}
                return await api.client.post("/queue/submit", json=told, headers=headers)

            ids = {(await post(1)).json()["job_id"] for _ in range(3)}
            assert len(ids) == 1
            assert ids.isdisjoint(same)
            problem(await post(2), 422, "idempotency_key_reused", "Idempotency-Key")
            both = await post(1, idempotency_key="order-1")
            problem(both, 422, "invalid_input", "idempotency_key")
            problem(await post(1, key=""), 422, "invalid_input", "Idempotency-Key")
            for job_id in (*same, *ids):
                assert (await api.state(job_id, wait=30))["state"] == "done"
            assert set(gpu.runs.values()) == {1}
            assert (await api.submit("zimg", 1, idempotency_key="order-1")) == same[0]
            assert (await ledger_of(backend, "zimg")).published == 2

    async def test_a_deadline_is_a_time_or_a_while(self, backend: Backend) -> None:
        """A job that has not started by its deadline, given as a time or as a duration, ends as expired (C26, A23)."""
        async with serving(backend) as api, SimulatedGpu(name="a", mode=Mode.BUSY) as gpu:
            await api.register("zimg", gpu)
            soon = await api.submit("zimg", expires_in=0.2, tenant="t1", priority=9)
            late = await api.submit("zimg", deadline=backend.now() + 0.2)
            for job_id in (soon, late):
                assert (await api.state(job_id, wait=30))["state"] == "expired"
            told = {"model": "zimg", "deadline": 1, "expires_in": 1}
            answer = await api.client.post("/queue/submit", json=told)
            problem(answer, 422, "invalid_input", "expires_in")

    async def test_cancelled(self, backend: Backend) -> None:
        """A waiting job can be cancelled once, and is never sent to a GPU server (C26)."""
        async with serving(backend) as api, SimulatedGpu(name="a", mode=Mode.BUSY) as gpu:
            await api.register("zimg", gpu)
            job_id = await api.submit("zimg", delay=60)
            for expected in (True, False):
                answer = await api.client.delete(f"/queue/jobs/{job_id}")
                assert answer.json() == {"cancelled": expected}
            assert (await api.state(job_id))["state"] == "cancelled"
            assert gpu.posts == 0


async def test_a_queue_upstream_pushes(backend: Backend) -> None:
    """A job that an upstream queue pushes several times is run once, and is answered like a submitted job (C8)."""
    async with serving(backend) as api, SimulatedGpu(name="a", latency=0.01) as gpu:
        told = {"job_id": "upstream-7", "model": "zimg", "payload": {"n": 1}}
        answer = await api.client.post("/tasks/handle", json=told)
        assert problem(answer, 503, "no_slots")["reason"] == "no_endpoints"
        await api.register("zimg", gpu)
        ids = set()
        for _ in range(3):
            answer = await api.client.post("/tasks/handle", json=told)
            assert answer.status_code == 202
            ids.add(answer.json()["job_id"])
        (job_id,) = ids
        assert (await api.state(job_id, wait=30))["state"] == "done"
        answer = await api.client.post("/tasks/handle", json=told)
        assert (answer.status_code, answer.json()["job_id"]) == (202, job_id)
        assert gpu.runs == {job_id: 1}
        for wrong, field in (
            ({"idempotency_key": "k"}, "idempotency_key"),
            ({"job_id": "no way"}, "job_id"),
        ):
            answer = await api.client.post("/tasks/handle", json=told | wrong)
            problem(answer, 422, "invalid_input", field)
        del told["job_id"]
        assert (await api.client.post("/tasks/handle", json=told)).status_code == 422


async def empty(api: Api) -> bool:
    """Return whether no endpoint is registered."""
    return await api.endpoints() == {}


class TestModels:
    """Registrations and configurations take effect at once, at every server process."""

    async def test_register_list_drain_remove(self, backend: Backend) -> None:
        """Endpoints can be added and removed at run time, and the queue's capacity follows their slots (C12, B4)."""
        async with serving(backend) as api, SimulatedGpu(name="a", slots=2) as gpu:

            async def capacity() -> Any:
                answer = await api.client.get(f"/v1/queues/{queue_of('flux')}/settings")
                return answer.json()["capacity"]

            told = {"model": "flux", "server": "s1", "endpoint": gpu.url, "slots": 2}
            answer = await api.client.post("/admin/register", json=told | {"priority": 7})
            assert answer.status_code == 200
            one = answer.json()
            assert {name: one[name] for name in told} == told
            assert (one["priority"], one["free"], one["healthy"]) == (7, 2, False)
            assert await capacity() == 200
            answer = await api.client.post("/admin/register", json=told | {"slots": 4})
            assert answer.json()["slots"] == 4
            assert await capacity() == 400
            await api.client.post("/admin/register", json=told | {"server": "s2"})
            assert set(await api.endpoints()) == {"flux/s1", "flux/s2"}

            named = {"model": "flux", "server": "s1"}
            answer = await api.client.post("/admin/drain", json=named)
            assert (answer.status_code, answer.json()["draining"]) == (200, True)
            assert await capacity() == 200
            unknown = named | {"server": "s3"}
            answer = await api.client.post("/admin/drain", json=unknown)
            problem(answer, 404, "unknown_endpoint")
            answer = await api.client.post("/admin/remove", json=named)
            assert answer.json() == {"removed": True}

            async def gone() -> bool:
                answer = await api.client.post("/admin/remove", json=named)
                return bool(answer.json() == {"removed": False})

            await until(gone, "no slot of the endpoint is held")
            assert set(await api.endpoints()) == {"flux/s2"}
            answer = await api.client.post("/admin/remove", json=named | {"server": "s2"})
            await until(lambda: empty(api), "no endpoint is left")

    async def test_configurations(self, backend: Backend) -> None:
        """A configuration takes effect when it is written; after its deletion the defaults apply again (C13, C5)."""
        path = "/admin/model-configs/flux"
        default = json.loads(ModelConfig().model_dump_json())
        async with serving(backend) as api:
            assert (await api.client.get(path)).json() == default
            assert default["max_retries"] == 50
            told = {"model_type": "async", "poll_interval": 3, "max_poll_time": 1200}
            told["poll_endpoint_template"] = "/status/{id}"
            for _ in range(2):
                answer = await api.client.put(path, json=told)
                assert (answer.status_code, answer.json()) == (200, default | told)
                assert (await api.client.get(path)).json() == default | told
            for _ in range(2):
                answer = await api.client.delete(path)
                assert (answer.status_code, answer.json()) == (200, default)
            assert (await api.client.get(path)).json() == default

    async def test_models_come_in_pages(self, backend: Backend) -> None:
        """Models are listed in pages, each model once and in the order of names, with a link to the next page (C12)."""
        names = [f"m/{n:02} é?" for n in range(7)]
        async with serving(backend) as api:
            for name in reversed(names):
                await api.dispatcher.registry.register(name, "s", "http://127.0.0.1:1/x", 1)
            found: list[str] = []
            where: str | None = "/admin/endpoints?limit=3"
            pages = 0
            while where is not None:
                answer = await api.client.get(where)
                found += [one["model"] for one in answer.json()["models"]]
                link = answer.headers.get("link")
                assert (link is None) == ("next" not in answer.json())
                where = None if link is None else link[1:].partition(">")[0]
                pages += 1
            assert (found, pages) == (names, 3)


class TestDeadLetters:
    """Jobs that have failed for good are kept until an operator decides."""

    async def test_look_retry_discard(self, backend: Backend) -> None:
        """Failed jobs of all models are listed with their errors, and can be retried or discarded (C16, C17, C26)."""
        async with (
            serving(backend, breaker_failures=1000) as api,
            SimulatedGpu(name="a", mode=Mode.FAIL, latency=0.001, slots=4) as first,
            SimulatedGpu(name="b", mode=Mode.FAIL, latency=0.001, slots=4) as second,
        ):
            for model, gpu in (("flux", first), ("a/b c", second)):
                path = f"/admin/model-configs/{model}"
                await api.client.put(path, json={"max_retries": 0})
                await api.register(model, gpu)
            ids = [await api.submit(m, {"n": n}) for n in range(5) for m in ("flux", "a/b c")]
            for job_id in ids:
                told = await api.state(job_id, wait=30)
                assert (told["state"], bool(told["error"])) == ("failed", True)

            async def listed(query: str = "") -> list[dict[str, Any]]:
                found: list[dict[str, Any]] = []
                where: str | None = f"/admin/dlq?limit=3{query}"
                while where is not None:
                    answer = await api.client.get(where)
                    assert answer.status_code == 200, answer.text
                    found += answer.json()["jobs"]
                    link = answer.headers.get("link")
                    where = None if link is None else link[1:].partition(">")[0]
                return found

            await bury_elsewhere(backend)
            letters = await listed()
            assert sorted(one["job_id"] for one in letters) == sorted(ids)
            assert {one["model"] for one in letters} == {"flux", "a/b c"}
            assert all(one["error"] and one["failed_at"] and one["reason"] for one in letters)
            of_flux = await listed("&model=flux")
            times = [one["failed_at"] for one in of_flux]
            assert times == sorted(times)
            assert {one["payload"]["n"] for one in of_flux} == set(range(5))
            assert {one["model"] for one in of_flux} == {"flux"}

            first.mode = second.mode = Mode.OK
            answer = await api.client.post(f"/admin/dlq/{ids[0]}/retry")
            assert answer.json() == {"count": 1}
            assert (await api.state(ids[0], wait=30))["state"] == "done"
            assert (await api.client.post(f"/admin/dlq/{ids[0]}/retry")).json() == {"count": 0}
            for expected in (1, 0):
                answer = await api.client.delete(f"/admin/dlq/{ids[1]}")
                assert answer.json() == {"count": expected}
            assert (await api.state(ids[1]))["state"] == "failed"
            answer = await api.client.post("/admin/dlq/retry-all?model=flux")
            assert answer.json() == {"count": 4}
            answer = await api.client.post("/admin/dlq/retry-all")
            assert answer.json() == {"count": 4}
            for job_id in ids[2:]:
                assert (await api.state(job_id, wait=30))["state"] == "done"
            assert await listed() == []
            assert (await control_of(backend).ledger("work")).dead == 1
            for model in ("flux", "a/b c"):
                assert (await ledger_of(backend, model)).balanced

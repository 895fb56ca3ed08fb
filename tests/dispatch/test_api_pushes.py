"""Tests of results that GPU servers push: only the holder of the slot's token can report the end of its job."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import SlotLease
from taskqueue_core.limits import LIMITS
from taskqueue_dispatch.gpu_server.simulator import SimulatedGpu
from taskqueue_dispatch.job_notes import push_token
from taskqueue_dispatch.models import ModelConfig, ModelType
from taskqueue_server.routing.operations import RequestContext
from tests.dispatch.api import Api, serving
from tests.dispatch.patience import until
from tests.dispatch.support import ASKED, Gate
from tests.server.access import ADMIN, A, bearer, entry, write
from tests.server.support import problem

PUSHED = ModelConfig(
    model_type=ModelType.ASYNC, poll_endpoint_template=ASKED, poll_interval=60, max_poll_time=120
)
"""a model that is polled so rarely that only a push can end a job quickly"""
_NO_ENDS = [
    (b"", 400),
    (b"{", 400),
    (b'{"status":"success"', 400),
    (b'"done"', 422),
    (b"[]", 422),
    (b"{}", 422),
    (b'{"status":"accepted","accepted":"1"}', 422),
    (b'{"status":"processing"}', 422),
    (b'{"status":7}', 422),
    (b'{"status":"done","result":' + b"[" * 101 + b"]" * 101 + b"}", 422),
    (b'{"status":"done","result":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
    (b'{"status":"done","result":"' + b"x" * LIMITS.result + b'"}', 413),
]
DONE = {"status": "success", "result": {"url": "x"}}


async def begun(
    api: Api, gpu: SimulatedGpu, model: str = "zimg", config: ModelConfig = PUSHED
) -> tuple[str, SlotLease]:
    """Submit a job, wait until the GPU server has it, and return the job's id and its lease."""
    await api.dispatcher.registry.configure(model, config)
    await api.register(model, gpu)
    job_id = await api.submit(model)
    await until(lambda: gpu.active == 1)

    def lease() -> SlotLease | None:
        held = api.dispatcher.renewer._held
        return next((one.lease for one in held if one.lease.job == job_id), None)

    await until(lambda: lease() is not None)
    found = lease()
    assert found is not None
    return job_id, found


@asynccontextmanager
async def running(
    backend: Backend, config: ModelConfig = PUSHED
) -> AsyncIterator[tuple[Api, str, SlotLease]]:
    """Run a server with one job that does not end by itself; yield the job's id and lease."""
    async with (
        serving(backend) as api,
        SimulatedGpu(name="a", asynchronous=True, handler=Gate()) as gpu,
    ):
        yield api, *await begun(api, gpu, config=config)


def altered(text: str) -> str:
    """Return the text with another last character, of those that ids and tokens use."""
    return text[:-1] + ("1" if text.endswith("0") else "0")


def signed(api: Api, job_id: str, lease_token: str) -> str:
    """Return the token that the dispatcher sends with a job."""
    return push_token(api.dispatcher.registry.secrets[0], job_id, lease_token)


async def push(
    api: Api, job_id: str, token: str | None, told: object = DONE, *, forged: bool = False
) -> httpx2.Response:
    """Push the end of a job, as a GPU server does; if ``forged``, with a token that no dispatcher has signed."""
    if token is not None and not forged:
        token = signed(api, job_id, token)
    headers = {} if token is None else {"x-lease-token": token}
    return await api.client.post(f"/tasks/callback/{job_id}", json=told, headers=headers)


class TestPush:
    """To push a result, a GPU server needs only the token of the job's slot."""

    async def test_a_result_is_pushed(self, backend: Backend) -> None:
        """A pushed result ends the job at once, without waiting for the next poll (C3, C7, B8)."""
        async with running(backend) as (api, job_id, lease):
            answer = await push(api, job_id, lease.token)
            assert (answer.status_code, answer.json()) == (200, {"outcome": "taken"})
            assert (await api.state(job_id, wait=30))["state"] == "done"
            answer = await api.client.get(f"/queue/jobs/{job_id}/result")
            assert answer.json() == DONE["result"]

    async def test_the_component_pushes_by_itself(self, backend: Backend) -> None:
        """A GPU server with the dispatcher's address pushes results without polls or an API token (C7)."""
        async with (
            serving(backend) as api,
            SimulatedGpu(name="a", asynchronous=True, latency=0.05, dispatcher=api.url) as gpu,
        ):
            await api.dispatcher.registry.configure("zimg", PUSHED)
            await api.register("zimg", gpu)
            ids = [await api.submit("zimg") for _ in range(3)]
            for job_id in ids:
                assert (await api.state(job_id, wait=30))["state"] == "done"
            assert gpu.runs == dict.fromkeys(ids, 1)

    async def test_a_failure_is_pushed(self, backend: Backend) -> None:
        """A pushed failure counts like a polled one, and its error is kept (C4, C7, C16)."""
        config = PUSHED.model_copy(update={"max_retries": 0})
        async with running(backend, config) as (api, job_id, lease):
            told = {"status": "failed", "error": "out of memory"}
            assert (await push(api, job_id, lease.token, told)).status_code == 200
            state = await api.state(job_id, wait=30)
            assert state["state"] == "failed"
            assert "out of memory" in state["error"]

    async def test_what_is_late_changes_nothing_and_is_kept(self, backend: Backend) -> None:
        """A push with a stale token is refused with 409 and stored as a late note.

        It does not change the job (C7, OPEN-C4, fault H2).
        """
        async with running(backend) as (api, job_id, lease):
            stale = altered(lease.token)
            for number in range(2):
                problem(await push(api, job_id, stale, DONE | {"result": number}), 409, "late")
            assert (await api.state(job_id))["state"] == "running"
            answer = await api.client.get(f"/admin/late/{job_id}")
            assert answer.json() == {"notes": [DONE | {"result": 0}, DONE | {"result": 1}]}
            assert (await push(api, job_id, lease.token)).status_code == 200
            assert (await api.state(job_id, wait=30))["state"] == "done"
            problem(await push(api, job_id, lease.token, DONE | {"result": 2}), 409, "late")
            answer = await api.client.get(f"/admin/late/{job_id}")
            assert answer.json()["notes"][-1] == DONE | {"result": 2}
            answer = await api.client.get(f"/queue/jobs/{job_id}/result")
            assert answer.json() == DONE["result"]


class TestGuard:
    """The push path is public, so a push without the right token is neither read nor stored, and reveals nothing."""

    async def test_no_token_and_no_job(self, backend: Backend) -> None:
        """A push without a valid token, or for an unknown job, is refused and not stored (security 1, 21)."""
        async with running(backend) as (api, job_id, lease):
            for token in (None, "", "a b", "x" * 201):
                problem(await push(api, job_id, token, forged=True), 401, "unauthenticated")
            raw = [(b"x-lease-token", b"\xe9"), (b"content-type", b"application/json")]
            answer = await api.client.post(f"/tasks/callback/{job_id}", content=b"1", headers=raw)
            problem(answer, 401, "unauthenticated")
            for other in ("nowhere", job_id[:-1] + "g", job_id.replace("-", "-0")):
                problem(await push(api, other, lease.token), 404, "unknown_job")
                problem(
                    await push(api, other, signed(api, job_id, lease.token), forged=True),
                    401,
                    "unauthenticated",
                )
            answer = await api.client.get("/admin/late/nowhere")
            problem(answer, 404, "unknown_job")
            assert (await api.client.get(f"/admin/late/{job_id}")).json() == {"notes": []}

    async def test_a_forged_token(self, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
        """A forged token is refused before the body is read, without a call to the store, and stores nothing (C5).

        Nine forged reports of a known job once displaced its genuine late report.
        """
        async with running(backend) as (api, job_id, lease):
            genuine = signed(api, job_id, lease.token)
            problem(await push(api, job_id, altered(lease.token)), 409, "late")
            other = signed(api, altered(job_id), lease.token)
            called: list[int] = []

            async def called_store(*_: object) -> None:
                called.append(1)

            with monkeypatch.context() as patched:
                patched.setattr(RequestContext, "read", called_store)
                patched.setattr(api.dispatcher.jobs, "find", called_store)
                patched.setattr(api.dispatcher.pool, "leave", called_store)
                for forged in (lease.token, altered(genuine), other, "k.1.b", "a.b." + "0" * 32):
                    for _ in range(2):
                        answer = await push(api, job_id, forged, forged=True)
                        problem(answer, 401, "unauthenticated")
            assert called == []
            answer = await api.client.get(f"/admin/late/{job_id}")
            assert answer.json() == {"notes": [DONE]}
            assert (await push(api, job_id, lease.token)).status_code == 200

    async def test_another_jobs_token(self, backend: Backend) -> None:
        """The token of one job's slot cannot end another job (security 2, OPEN-C4)."""
        async with (
            serving(backend) as api,
            SimulatedGpu(name="a", asynchronous=True, handler=Gate()) as first,
            SimulatedGpu(name="b", asynchronous=True, handler=Gate()) as second,
        ):
            mine, my_lease = await begun(api, first)
            theirs, their_lease = await begun(api, second, "flux")
            problem(await push(api, theirs, my_lease.token), 409, "late")
            problem(await push(api, mine, their_lease.token), 409, "late")
            for job_id in (mine, theirs):
                assert (await api.state(job_id))["state"] == "running"

    async def test_what_is_no_end(self, backend: Backend) -> None:
        """A push that does not report the end of a job is refused even with the right token.

        The job continues (fault K2, security 12).
        """
        async with running(backend) as (api, job_id, lease):
            token = signed(api, job_id, lease.token)
            headers = {"x-lease-token": token, "content-type": "application/json"}
            where = f"/tasks/callback/{job_id}"
            for body, status in _NO_ENDS:
                answer = await api.client.post(where, content=body, headers=headers)
                assert answer.status_code == status, (body[:50], answer.text)
                assert "x" * 50 not in answer.text
            assert (await api.state(job_id))["state"] == "running"
            ended = {"status": "done", "unknown": [1], "job_id": job_id}
            assert (await push(api, job_id, lease.token, ended)).status_code == 200

    async def test_a_huge_body_is_not_read_to_its_end(self, backend: Backend) -> None:
        """A body that is too large is refused early, with or without a Content-Length header (security 12)."""
        async with running(backend) as (api, job_id, lease):
            sent = 0

            async def endless() -> Any:
                nonlocal sent
                while True:
                    sent += 65_536
                    yield b" " * 65_536

            token = signed(api, job_id, lease.token)
            headers = {"x-lease-token": token, "content-type": "application/json"}
            try:
                answer = await api.client.post(
                    f"/tasks/callback/{job_id}", content=endless(), headers=headers
                )
                assert answer.status_code == 413
            except httpx2.TransportError:
                pass  # the server cut the connection while the client was still sending
            assert sent < 64 * LIMITS.result

    async def test_with_a_tokens_file(self, backend: Backend, tmp_path: Path) -> None:
        """Pushes need no API token, while only the model's administrators can read late notes (security 2, 3)."""
        path = write(
            tmp_path / "tokens.toml",
            entry(ADMIN, "admin"),
            entry(A, "a", keys=["dispatch:other"]),
        )
        async with (
            serving(backend, tokens=path) as api,
            SimulatedGpu(name="a", asynchronous=True, handler=Gate()) as gpu,
        ):
            api.client.headers.update(bearer(ADMIN))
            job_id, lease = await begun(api, gpu)
            del api.client.headers["authorization"]
            problem(await push(api, job_id, "k.1.z"), 409, "late")
            where = f"/admin/late/{job_id}"
            problem(await api.client.get(where), 401, "unauthenticated")
            problem(await api.client.get(where, headers=bearer(A)), 404, "unknown_job")
            answer = await api.client.get(where, headers=bearer(ADMIN))
            assert json.loads(answer.content) == {"notes": [DONE]}
            assert (await push(api, job_id, lease.token)).status_code == 200
            api.client.headers.update(bearer(ADMIN))
            assert (await api.state(job_id, wait=30))["state"] == "done"

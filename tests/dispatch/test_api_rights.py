"""Tests of access rights: each operation of the dispatcher checks the verbs and the keys of the caller's token."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import pytest
from starlette.routing import Route

from taskqueue_core.backend import Backend
from taskqueue_dispatch.api import extension
from taskqueue_dispatch.api.extension import OPERATIONS
from taskqueue_dispatch.gpu_server.simulator import Mode, SimulatedGpu
from taskqueue_dispatch.names import JOBS, queue_of
from taskqueue_memory import MemoryBackend
from taskqueue_server.api.table import OPERATIONS as CORE
from taskqueue_server.app import create_app
from taskqueue_server.auth import access
from taskqueue_server.dashboard.app import OPERATIONS as PAGES
from taskqueue_server.metrics.http import OPERATIONS as METRICS
from taskqueue_server.prefect import OPERATIONS as PREFECT
from taskqueue_server.routing.operations import Operation, Scope
from tests.dispatch.api import serving
from tests.dispatch.patience import until
from tests.dispatch.support import settings
from tests.server.access import ADMIN, ALL, A, B, bearer, entry, write
from tests.server.support import problem
from tests.server.support import settings as server_settings

PUBLIC = {"POST /tasks/callback/{job_id}"}
"""operations without verbs, because they check the token of a job's slot"""
BODIES: dict[str, Any] = {
    "POST /admin/register": {"server": "s", "endpoint": "http://127.0.0.1:1/", "slots": 1},
    "POST /admin/drain": {"server": "s"},
    "POST /admin/remove": {"server": "s"},
    "POST /queue/submit": {},
    "POST /tasks/handle": {"job_id": "up-1"},
    "PUT /admin/model-configs/{model:path}": None,
}
MODELS = ("zimg", "a/b", 'ünï "çode"', "50% +?#&=;", "a" * 200, "-.-", "../up", "x//y/")


def name(one: Operation) -> str:
    """Return the method and path of an operation."""
    return f"{one.method} {one.path}"


GUARDED = [one for one in OPERATIONS if one.verbs]


async def ask(
    client: httpx2.AsyncClient, one: Operation, model: str, job_id: str, token: str | None
) -> httpx2.Response:
    """Call an operation for a model, or for one of its jobs."""
    path = one.path.replace("{model:path}", quote(model, safe="")).replace("{job_id}", job_id)
    told = BODIES.get(name(one), {})
    body = {} if told is None else told | {"model": model}
    headers = {"content-type": "application/json"}
    if any(query.name == "model" for query in one.query):
        path += f"?model={quote(model, safe='')}"
    return await client.request(
        one.method,
        path,
        headers=headers | ({} if token is None else bearer(token)),
        content=json.dumps(body) if one.body is not None else None,
    )


def test_every_route_is_in_a_table() -> None:
    """Security 2: every HTTP route is listed in a table with the verbs it needs. Only the push of results is public."""
    made = extension(settings())
    app = create_app(MemoryBackend(), server_settings(), [made])
    told = (*CORE, *METRICS, *PAGES, *PREFECT, *OPERATIONS, *made.pages)
    paths = {route.path for route in app.routes if isinstance(route, Route)}
    assert paths == {one.path for one in told}
    assert {name(one) for one in OPERATIONS if not one.verbs} == PUBLIC
    for one in OPERATIONS:
        assert one.strict
        assert set(one.verbs) <= {"publish", "admin"}
        assert not one.verbs or one.scope is Scope.HANDLER
        assert ("/admin/" in one.path) == (one.verbs == ("admin",)), name(one)
    assert {name(one) for one in OPERATIONS if one.body is not None} - PUBLIC == BODIES.keys()


async def test_every_operation(backend: Backend, tmp_path: Path) -> None:
    """Each operation answers 401 without a token, and 403 without the verb or the model (fault K1, security 2)."""
    path = write(
        tmp_path / "tokens.toml",
        entry(ADMIN, "admin"),
        entry(A, "a", keys=[queue_of("a/b")]),
        entry(B, "b", keys=[queue_of("flux"), "a", "b"]),
        *(entry(f"no {verb}", verbs=[v for v in ALL if v != verb]) for verb in ALL),
        entry("consumes", verbs=["consume"]),
    )
    async with (
        serving(backend, tokens=path) as api,
        SimulatedGpu(name="gpu", mode=Mode.BUSY) as gpu,
    ):
        api.client.headers.update(bearer(ADMIN))
        await api.register("a/b", gpu)
        job_id = await api.submit("a/b")
        del api.client.headers["authorization"]
        for one in GUARDED:
            for stranger in (None, "tq_wrong"):
                answer = await ask(api.client, one, "a/b", job_id, stranger)
                problem(answer, 401, "unauthenticated")
            without = "consumes" if len(one.verbs) > 1 else f"no {one.verbs[0]}"
            answer = await ask(api.client, one, "a/b", job_id, without)
            problem(answer, 403, "forbidden")
            answer = await ask(api.client, one, "a/b", job_id, B)
            if "{job_id}" in one.path:
                problem(answer, 404, "unknown_job")
                nothing = await ask(api.client, one, "a/b", "nothing", B)
                assert nothing.json() == answer.json()
            else:
                problem(answer, 403, "forbidden")
        assert set(await models_of(api.client, ADMIN)) == {"a/b"}
        for one in sorted(GUARDED, key=lambda one: one.method == "DELETE"):
            answer = await ask(api.client, one, "a/b", job_id, A)
            assert answer.status_code not in {401, 403, 500}, (name(one), answer.text)


async def models_of(client: httpx2.AsyncClient, token: str) -> list[str]:
    """Return the models that the token may see."""
    answer = await client.get("/admin/endpoints", headers=bearer(token))
    return [one["model"] for one in answer.json()["models"]]


async def test_lists_leave_out_what_is_anothers(backend: Backend, tmp_path: Path) -> None:
    """A token neither sees nor retries anything of models outside its keys (security 2, C17)."""
    path = write(
        tmp_path / "tokens.toml",
        entry(ADMIN, "admin"),
        entry(A, "a", keys=[queue_of("mine")]),
    )
    async with (
        serving(backend, tokens=path) as api,
        SimulatedGpu(name="g1", mode=Mode.FAIL, latency=0.001) as first,
        SimulatedGpu(name="canary-server", mode=Mode.FAIL, latency=0.001) as second,
    ):
        api.client.headers.update(bearer(ADMIN))
        for model, gpu in (("mine", first), ("canary", second)):
            await api.client.put(f"/admin/model-configs/{model}", json={"max_retries": 0})
            await api.register(model, gpu)
            job_id = await api.submit(model, f"payload of {model}")
            assert (await api.state(job_id, wait=30))["state"] == "failed"
        for where in ("/admin/endpoints", "/admin/dlq"):
            told = (await api.client.get(where, headers=bearer(A))).text
            assert "mine" in told
            assert "canary" not in told
            assert "canary" in (await api.client.get(where)).text
        answer = await api.client.post("/admin/dlq/retry-all", headers=bearer(A))
        assert answer.json() == {"count": 1}
        letters = (await api.client.get("/admin/dlq?model=canary")).json()["jobs"]
        assert [one["model"] for one in letters] == ["canary"]


async def test_a_server_of_others_takes_a_token_that_is_for_them(
    backend: Backend, tmp_path: Path
) -> None:
    """A token for one model cannot limit how many jobs a shared GPU server runs for another model (security 2, 22)."""
    path = write(
        tmp_path / "tokens.toml",
        entry(ADMIN, "admin"),
        entry(A, "a", keys=[queue_of("mine")]),
    )
    async with serving(backend, tokens=path) as api:
        told = {"server": "shared", "endpoint": "http://127.0.0.1:1/x", "slots": 4}

        async def register(model: str, token: str, **fields: Any) -> httpx2.Response:
            body = told | {"model": model} | fields
            return await api.client.post("/admin/register", json=body, headers=bearer(token))

        assert (await register("theirs", ADMIN, together=4)).status_code == 200
        problem(await register("mine", A, together=1), 403, "forbidden")
        assert (await register("mine", A, together=1, server="own")).status_code == 200
        assert (await register("mine", ADMIN)).status_code == 200


async def test_models_of_any_spelling(backend: Backend) -> None:
    """A model name may contain any printable character, in bodies, paths, queries and pages (C5, OPEN-C5)."""
    async with serving(backend) as api, SimulatedGpu(name="gpu é/1", latency=0.001) as gpu:
        for model in MODELS:
            path = f"/admin/model-configs/{quote(model, safe='')}"
            answer = await api.client.put(path, json={"poll_interval": 7})
            assert answer.status_code == 200, answer.text
            assert (await api.dispatcher.registry.config(model)).poll_interval == 7
            await api.register(model, gpu)
            assert set(await api.endpoints(model=model)) == {f"{model}/gpu é/1"}
            job_id = await api.submit(model, {"n": 1})
            told = await api.state(job_id, wait=30)
            assert (told["state"], told["model"]) == ("done", model)
            assert (await api.client.delete(path)).json()["poll_interval"] == 2
            named = {"model": model, "server": "gpu é/1"}
            assert (await api.client.post("/admin/drain", json=named)).json()["draining"]


_NO_MODELS = ["", "a\x00b", "a\nb", "x" * 201, "\u2028", "\ue000", "\x7f"]


async def test_what_is_no_model() -> None:
    """Each operation refuses an invalid model name, without repeating it in the answer (security 19, fault K2)."""
    async with serving(MemoryBackend()) as api:
        for told in _NO_MODELS:
            for one in (one for one in GUARDED if "{job_id}" not in one.path):
                if "model" in {query.name for query in one.query} or name(one) in BODIES:
                    answer = await ask(api.client, one, told, "j", None)
                    if "\n" in told and "{model:path}" in one.path:
                        problem(answer, 404, "not_found")
                    else:
                        problem(answer, 422, "invalid_input", "model")
                    assert not told or told not in answer.text
        answer = await api.client.get("/admin/model-configs/%FF%FE")
        problem(answer, 422, "invalid_input", "model")
        queues = await api.dispatcher.control.queues()
        assert not [key for key in queues if key.startswith(JOBS)]
        assert (await api.client.get("/admin/endpoints")).json() == {"models": []}


async def test_a_job_of_a_revoked_token(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that waits for a job is disconnected when its token is revoked (security 6)."""
    monkeypatch.setattr(access, "RELOAD_SECONDS", 0.05)
    path = write(tmp_path / "tokens.toml", entry(ADMIN, "admin"), entry(A, "a"))
    async with (
        serving(backend, tokens=path) as api,
        SimulatedGpu(name="gpu", mode=Mode.BUSY) as gpu,
    ):
        api.client.headers.update(bearer(ADMIN))
        await api.register("flux", gpu)
        job_id = await api.submit("flux")
        where = f"/queue/jobs/{job_id}?wait=30"
        waiting = asyncio.create_task(api.client.get(where, headers=bearer(A), timeout=60))
        await until(lambda: len(api.context.waiters) == 1)
        write(path, entry(ADMIN, "admin"))
        problem(await asyncio.wait_for(waiting, 20), 401, "unauthenticated")

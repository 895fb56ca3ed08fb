"""A test server that includes the dispatcher, with an HTTP client for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx2

from taskqueue_core.backend import Backend
from taskqueue_dispatch.api import extension
from taskqueue_dispatch.gpu_server.simulator import SimulatedGpu
from taskqueue_dispatch.service import Dispatcher
from taskqueue_server.context.server import ServerContext
from tests.dispatch.patience import PATIENCE, until
from tests.dispatch.support import settings
from tests.server.support import http, running


class Api:
    """A running server with a dispatcher, and an HTTP client that is connected to it."""

    def __init__(self, client: httpx2.AsyncClient, context: ServerContext, url: str) -> None:
        self.client = client
        self.context = context
        self.dispatcher = cast("Dispatcher", context.extension_state["dispatch"])
        self.url = url

    async def register(self, model: str, *gpus: SimulatedGpu, **fields: Any) -> None:
        """Register simulated GPU servers for a model, and wait until all of them are healthy."""
        for gpu in gpus:
            told = {"model": model, "server": gpu.name, "endpoint": gpu.url, "slots": gpu.slots}
            answer = await self.client.post("/admin/register", json=told | fields)
            assert answer.status_code == 200, answer.text
        await until(lambda: self._well(model), "every server is healthy")

    async def submit(self, model: str, payload: object = None, **fields: Any) -> str:
        """Submit a job, which the server must accept, and return the job's id."""
        told = {"model": model, "payload": payload} | fields
        answer = await self.client.post("/queue/submit", json=told)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["job_id"])

    async def state(self, job_id: str, wait: int = 0) -> dict[str, Any]:
        """Return the status of a job as JSON; wait up to ``wait`` seconds for the job to end."""
        answer = await self.client.get(f"/queue/jobs/{job_id}?wait={wait}", timeout=wait + PATIENCE)
        assert answer.status_code == 200, answer.text
        return cast("dict[str, Any]", answer.json())

    async def endpoints(self, **query: str) -> dict[str, dict[str, Any]]:
        """Return all registered endpoints, indexed by ``model/server``."""
        answer = await self.client.get("/admin/endpoints", params=query)
        assert answer.status_code == 200, answer.text
        return {
            f"{one['model']}/{one['server']}": one
            for model in answer.json()["models"]
            for one in model["endpoints"]
        }

    async def _well(self, model: str) -> bool:
        return all(one["healthy"] for one in (await self.endpoints(model=model)).values())


@asynccontextmanager
async def serving(backend: Backend, *, tokens: Any = None, **values: Any) -> AsyncIterator[Api]:
    """Run a server with a dispatcher that has short timeouts; ``tokens`` is the path of a tokens file."""
    async with (
        running(backend, extensions=[extension(settings(**values))], tokens_file=tokens) as it,
        http(it) as client,
    ):
        yield Api(client, it.context, it.server.url)

"""The requests that a task worker of Prefect makes beside its socket: before the first run it asks for the version."""

from __future__ import annotations

from starlette.responses import Response

from taskqueue_server.api import system as http_system
from taskqueue_server.routing.operations import Call, Operation, answer

__all__ = ["OPERATIONS"]


async def version(call: Call) -> Response:
    """Return the version of Prefect whose worker is served: a worker of another major version refuses to run."""
    return answer(call.hub.settings.prefect_version)


async def health(_: Call) -> Response:
    """Say that the server is there."""
    return answer(value=True)


OPERATIONS = (
    Operation(method="GET", path="/api/admin/version", handler=version, answers={200: str}),
    Operation(method="GET", path="/api/health", handler=health, answers={200: bool}),
    Operation(method="GET", path="/api/ready", handler=http_system.ready, answers={200: None}),
)

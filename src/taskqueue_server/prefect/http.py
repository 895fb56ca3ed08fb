"""``/api/events/in``: what workers tell of their runs' states. Nobody asks for it here, so it is read and dropped.

Without this socket each run would write two errors to its worker's log.
"""

from __future__ import annotations

import asyncio

from starlette.responses import Response
from starlette.websockets import WebSocket

from taskqueue_core.concurrency import first_completed
from taskqueue_server.api import system
from taskqueue_server.prefect import frames
from taskqueue_server.prefect.handshake import Guest, PrefectSessionEnd, restart, welcome
from taskqueue_server.routing.operations import Operation, RequestContext, answer

PATH = "/api/events/in"


async def socket(websocket: WebSocket) -> None:
    """Serve one process."""
    await welcome(websocket, _visit)


async def _visit(guest: Guest) -> PrefectSessionEnd:
    # It is no worker: only its id makes it known.
    guest.worker_id = f"events:{guest.connection_id}"
    guest.context.registry.identify(guest, guest.worker_id)
    with guest.context.access.watch_access(
        guest.token, guest.peer, lambda identity: "consume" in identity.verbs
    ) as dismissed:
        return await first_completed(guest.wait_closed(), restart(guest), _dismissed(dismissed))


async def _dismissed(event: asyncio.Event) -> PrefectSessionEnd:
    await event.wait()
    return PrefectSessionEnd("the token is no longer valid", frames.CLOSE_POLICY)


async def version(call: RequestContext) -> Response:
    """Return the version of Prefect whose worker is served: a worker of another major version refuses to run."""
    return answer(call.context.settings.prefect_version)


async def health(_: RequestContext) -> Response:
    """Say that the server is there."""
    return answer(value=True)


OPERATIONS = (
    Operation(method="GET", path="/api/admin/version", handler=version, answers={200: str}),
    Operation(method="GET", path="/api/health", handler=health, answers={200: bool}),
    Operation(method="GET", path="/api/ready", handler=system.ready, answers={200: None}),
)

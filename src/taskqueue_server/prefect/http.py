"""``/api/events/in``: what workers tell of their runs' states. Nobody asks for it here, so it is read and dropped.

Without this socket each run would write two errors to its worker's log.
"""

from __future__ import annotations

import asyncio

from starlette.websockets import WebSocket

from taskqueue_core.concurrency import first
from taskqueue_server.prefect import frames
from taskqueue_server.prefect.handshake import End, Guest, restart, welcome

__all__ = ["PATH", "socket"]

PATH = "/api/events/in"


async def socket(websocket: WebSocket) -> None:
    """Serve one process."""
    await welcome(websocket, _visit)


async def _visit(guest: Guest) -> End:
    # It is no worker: only its id makes it known.
    guest.worker_id = f"events:{guest.connection_id}"
    guest.hub.registry.identify(guest, guest.worker_id)
    with guest.hub.access.stay(
        guest.token, guest.peer, lambda who: "consume" in who.verbs
    ) as dismissed:
        return await first(guest.left(), restart(guest), _dismissed(dismissed))


async def _dismissed(event: asyncio.Event) -> End:
    await event.wait()
    return End("the token is not good any more", frames.CLOSE_POLICY)

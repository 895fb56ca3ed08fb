"""``/v1/socket``: which sockets are accepted, before anybody has said a word."""

from __future__ import annotations

from starlette.websockets import WebSocket

from taskqueue_core.protocol.frames import CLOSE_TRY_LATER, SUBPROTOCOL
from taskqueue_core.server.channel import Gone
from taskqueue_core.server.connection import Connection
from taskqueue_core.server.hub import Hub
from taskqueue_core.server.origins import host_problem
from taskqueue_core.server.problems import ProblemError, respond

__all__ = ["socket"]


async def socket(websocket: WebSocket) -> None:
    """Serve one worker. Refusals before the handshake are HTTP problems, later ones close codes."""
    hub: Hub = websocket.app.state.hub
    refusal = _refusal(hub, websocket)
    try:
        if refusal is not None:
            await websocket.send_denial_response(respond(refusal))
            return
        await websocket.accept(SUBPROTOCOL)
        if not hub.registry.has_room:
            await websocket.close(CLOSE_TRY_LATER, "too_many")
            return
    except (OSError, RuntimeError, Gone):
        return  # it left during the handshake
    await Connection(hub, websocket).run()


def _refusal(hub: Hub, websocket: WebSocket) -> ProblemError | None:
    names = hub.settings.allowed_hosts
    if wrong := host_problem(websocket.headers, names, loopback=not hub.authenticates):
        return ProblemError(421, "wrong_host", wrong)
    if "origin" in websocket.headers:
        return ProblemError(403, "origin", "pages of browsers may not open this socket")
    if SUBPROTOCOL not in websocket.scope["subprotocols"]:
        return ProblemError(426, "subprotocol", f"the subprotocol {SUBPROTOCOL} is required")
    if hub.draining.is_set() or not hub.started:
        return ProblemError(503, "not_ready", "not ready", headers={"retry-after": "1"})
    return None

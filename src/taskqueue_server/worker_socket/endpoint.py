"""``/v1/socket``: which sockets are accepted, before anybody has said a word."""

from __future__ import annotations

from starlette.websockets import WebSocket

from taskqueue_core.hooks import Identity
from taskqueue_core.protocol.frames import CLOSE_TRY_LATER, SUBPROTOCOL
from taskqueue_server.auth.credentials import peer_of, shows_header, token_of
from taskqueue_server.auth.origins import host_problem
from taskqueue_server.context.server import ServerContext
from taskqueue_server.problems import ProblemError, respond
from taskqueue_server.worker_socket.admission import SocketAdmission
from taskqueue_server.worker_socket.websocket import ConnectionClosed

_CHALLENGE = {"www-authenticate": "Bearer"}


async def socket(websocket: WebSocket) -> None:
    """Serve one worker. Refusals before the handshake are HTTP problems, later ones close codes."""
    context: ServerContext = websocket.app.state.context
    refused = refusal(context, websocket, SUBPROTOCOL) or _not_ready(context)
    identity = None
    # Without the header the token may come with the hello.
    if refused is None and context.access.authenticates and shows_header(websocket):
        identity = context.access.identify(token_of(websocket), peer_of(websocket))
        refused = _stranger(identity)
    try:
        if refused is not None:
            await websocket.send_denial_response(respond(refused))
            return
        await websocket.accept(SUBPROTOCOL)
        position, room = None, context.registry.has_room_for(known=identity is not None)
        if room and identity is not None:
            position = context.usage.enter(identity)
            room = position is not None
        if not room:
            await websocket.close(CLOSE_TRY_LATER, "too_many")
            return
    except (OSError, RuntimeError, ConnectionClosed):
        return  # it left during the handshake
    await SocketAdmission(context, websocket, position).run()


def refusal(context: ServerContext, websocket: WebSocket, subprotocol: str) -> ProblemError | None:
    """Say why a request is refused, by what it names: the server, a page, the protocol. ``None`` where it is not."""
    headers, settings = websocket.headers, context.settings
    if wrong := host_problem(
        headers, settings.allowed_hosts, loopback=not context.access.authenticates
    ):
        return ProblemError(421, "wrong_host", wrong)
    # Where the request went is no page's excuse here: the dashboard opens no such socket.
    origins = headers.getlist("origin")
    if origins and (len(origins) > 1 or origins[0] not in settings.origins):
        return ProblemError(403, "origin", "web pages may not open this socket")
    if websocket.scope["query_string"]:
        return ProblemError(
            400,
            "query",
            "query parameters are not accepted; send the token in the Authorization header",
        )
    if subprotocol not in websocket.scope["subprotocols"]:
        return ProblemError(426, "subprotocol", f"the subprotocol {subprotocol} is required")
    return None


def _not_ready(context: ServerContext) -> ProblemError | None:
    if context.draining.is_set() or not context.started:
        return ProblemError(503, "not_ready", "not ready", headers={"retry-after": "1"})
    return None


def _stranger(identity: Identity | None) -> ProblemError | None:
    if identity is None:
        return ProblemError(401, "unauthenticated", "a valid token is required", headers=_CHALLENGE)
    if "consume" not in identity.verbs:
        return ProblemError(403, "forbidden", "this token lacks the right to consume")
    return None

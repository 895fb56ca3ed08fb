"""The handshake of ``/v1/socket``: checks of the request, the hello, the permissions and the quota."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import cast

import msgspec
from starlette.websockets import WebSocket

from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import has
from taskqueue_core.concurrency import first_completed
from taskqueue_core.consumer.outage import close
from taskqueue_core.errors import BackendUnavailable, InvalidInput
from taskqueue_core.hooks import Connection as ConnectionInfo
from taskqueue_core.hooks import Identity
from taskqueue_core.protocol.frames import (
    CLOSE_PROTOCOL,
    CLOSE_RESTART,
    CLOSE_TIMEOUT,
    CLOSE_TRY_LATER,
    CLOSE_UNAUTHENTICATED,
    SUBPROTOCOL,
    Error,
    Feature,
    Hello,
    encode,
)
from taskqueue_core.protocol.server_session import (
    CloseSocket,
    Greeted,
    SendFrames,
    ServerSession,
)
from taskqueue_server.auth.credentials import peer_of, shows_header, token_of
from taskqueue_server.auth.origins import host_problem
from taskqueue_server.context.server import ServerContext, read_each
from taskqueue_server.problems import ProblemError, respond
from taskqueue_server.routing.operations import unauthenticated
from taskqueue_server.worker_socket.session import (
    READ_AT_ONCE,
    WorkerSession,
    report_connection,
)
from taskqueue_server.worker_socket.websocket import ConnectionClosed, WebSocketChannel

HELLO_SECONDS = 5.0
_SHOWN = 500
"""maximum number of characters of the list of queues in a message"""
_NO_TIMEOUTS = (
    "queues with a timeout need a worker with the feature 'timeouts'; upgrade this worker"
)
_log = logging.getLogger("taskqueue.server.socket")


async def socket(websocket: WebSocket) -> None:
    """Serve one worker. Errors before the WebSocket handshake are HTTP problems; later errors are close codes."""
    context: ServerContext = websocket.app.state.context
    refused = refusal(context, websocket, SUBPROTOCOL) or _not_ready(context)
    identity = None
    # Without an Authorization header, the token may be in the hello frame.
    if refused is None and context.access.authenticates and shows_header(websocket):
        identity = context.access.authenticate(websocket)
        refused = _stranger(identity)
    try:
        if refused is not None:
            await websocket.send_denial_response(respond(refused))
            return
        await websocket.accept(SUBPROTOCOL)
        has_room, slot = enter(context, identity)
        if not has_room:
            await websocket.close(CLOSE_TRY_LATER, "too_many")
            return
    except (OSError, RuntimeError, ConnectionClosed):
        return  # the client left during the handshake
    await SocketAdmission(context, websocket, slot).run()


def refusal(context: ServerContext, websocket: WebSocket, subprotocol: str) -> ProblemError | None:
    """Return the problem if the host, origin, query or subprotocol of a request is not allowed, otherwise ``None``."""
    headers, settings = websocket.headers, context.settings
    if wrong := host_problem(
        headers, settings.allowed_hosts, loopback=not context.access.authenticates
    ):
        return ProblemError(421, "wrong_host", wrong)
    # The server's own origin is allowed only if the settings list it, because the dashboard does not use this socket.
    origins = headers.getlist("origin")
    if origins and (len(origins) > 1 or origins[0] not in settings.origins):
        return ProblemError(403, "origin", "the Origin header is not in TASKQUEUE_ORIGINS")
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
        return ProblemError(503, "not_ready", "server not ready", headers={"retry-after": "1"})
    return None


def _stranger(identity: Identity | None) -> ProblemError | None:
    if identity is None:
        return unauthenticated()
    if "consume" not in identity.verbs:
        return ProblemError(403, "forbidden", "this token lacks the required right: consume")
    return None


def enter(context: ServerContext, identity: Identity | None) -> tuple[bool, ExitStack | None]:
    """Return whether one more socket is allowed, and the socket's quota slot if ``identity`` is known."""
    # If clients authenticate, `UnauthenticatedConnections` shares the room of the others fairly between addresses.
    known = identity is not None or context.access.authenticates
    if not context.registry.has_room_for(known=known):
        return False, None
    slot = None if identity is None else context.usage.enter(identity)
    return identity is None or slot is not None, slot


class SocketAdmission:
    """An accepted WebSocket of a worker, which stays registered for as long as it may hold deliveries.

    Call `run` only once.
    """

    def __init__(
        self, context: ServerContext, websocket: WebSocket, slot: ExitStack | None = None
    ) -> None:
        """Create an admission. ``slot`` is the quota slot of a client that sent a valid token in the header.

        Without ``slot``, the hello must have a valid token if the server has authentication.
        """
        self.connection_id = secrets.token_hex(8)
        self.worker_id: str | None = None
        self._context = context
        self._websocket = websocket
        self._peer = peer_of(websocket)
        self._known = slot is not None
        self._slot = slot
        self._token = token_of(websocket)
        self._channel = WebSocketChannel(websocket, context.settings.lease)
        self._session = ServerSession()
        self._deliveries_changed = asyncio.Event()

    @property
    def credit(self) -> int:
        """Number of deliveries that the worker still accepts."""
        return self._session.credit

    @property
    def busy(self) -> int:
        """Number of deliveries that the worker holds."""
        return self._session.busy

    def forget(self, receipts: Iterable[str]) -> None:
        """Drop receipts of deliveries that move to another connection of the same worker."""
        self._session.forget(receipts)
        self._deliveries_changed.set()

    async def run(self) -> None:
        """Serve the worker until its session ends."""
        self._context.registry.add(self, known=self._known)
        try:
            reading = read_hello(self._session, self._channel)
            match await first_completed(reading, self._restart()):
                case Hello() as hello:
                    await self._admit(hello)
                case CloseSocket(code, reason):
                    await self._channel.close(code, reason)
        except ConnectionClosed:
            pass  # the worker left before the welcome
        finally:
            self._release_quota()
            self._context.registry.remove(self)

    def _release_quota(self) -> None:
        if self._slot is not None:
            self._slot.close()

    async def _restart(self) -> Hello | CloseSocket:
        await self._context.draining.wait()
        return CloseSocket(CLOSE_RESTART, "restart")

    async def _admit(self, hello: Hello) -> None:
        token = self._token if self._known else hello.token
        identity = self._context.access.authenticate(self._websocket, token)
        if identity is None or "consume" not in identity.verbs:
            await self._refuse(
                "unauthenticated",
                "a valid token with the right consume is required",
                CLOSE_UNAUTHENTICATED,
            )
            return

        def may_stay(identity: Identity) -> bool:
            return all(identity.is_allowed("consume", key) for key in hello.keys)

        if not may_stay(identity):
            await self._refuse(
                "forbidden", "this token may not consume these keys", CLOSE_UNAUTHENTICATED
            )
            return
        if self._slot is None:
            self._slot = self._context.usage.enter(identity)
        if self._slot is None:
            await self._refuse(
                "too_many", "this token has reached its maximum number of sockets", CLOSE_TRY_LATER
            )
            return
        with self._context.access.watch_access(token, self._peer, may_stay) as access_revoked:
            await self._serve(hello, access_revoked, partial(identity.is_allowed, "consume"))

    async def _serve(
        self, hello: Hello, access_revoked: asyncio.Event, is_allowed: Callable[[str], bool]
    ) -> None:
        context = self._context
        hello = self._without_others(hello, is_allowed)
        withheld = await self._withheld(hello)
        if withheld is None:
            return
        try:
            keys = [key for key in hello.keys if key not in withheld]
            subscription = context.backend.subscribe(keys, hello.worker_id)
        except InvalidInput as error:
            await self._refuse("invalid_frame", str(error), CLOSE_PROTOCOL)
            return
        try:
            self.worker_id = hello.worker_id
            context.registry.identify(self, hello.worker_id)
            if has(context.backend, Capability.HANDOVER):
                context.registry.claim(self, hello.worker_id, hello.holding)
            session = WorkerSession(
                context,
                self._channel,
                self._session,
                subscription,
                deliveries_changed=self._deliveries_changed,
                access_revoked=access_revoked,
                withheld=withheld,
                on_closed=self._release_quota,
            )
            try:
                await session.welcome(hello, self.connection_id, is_allowed)
            except TimeoutError:
                await self._refuse("try_later", "the store is unavailable", CLOSE_TRY_LATER)
                return
            if withheld:
                text = (
                    f"this worker gets no tasks of {', '.join(withheld)[:_SHOWN]}: {_NO_TIMEOUTS}"
                )
                await self._channel.send(encode(Error(code="timeouts", message=text)))
            connection = ConnectionInfo(
                connection_id=self.connection_id,
                worker_id=hello.worker_id,
                keys=tuple(dict.fromkeys(keys)),
            )
            await report_connection(context.hooks, _log, connection, session.run())
        finally:
            await close(subscription)

    async def _withheld(self, hello: Hello) -> list[str] | None:
        """Return the keys whose tasks this worker does not get, because it cannot end attempts at their timeouts.

        Return ``None`` after refusing the worker: if none of its keys is left, or the store is unavailable.
        """
        if Feature.TIMEOUTS in self._session.features:
            return []
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                found = await read_each(self._context.control.settings, hello.keys, READ_AT_ONCE)
        except (TimeoutError, BackendUnavailable):
            await self._refuse("try_later", "the store is unavailable", CLOSE_TRY_LATER)
            return None
        pairs = zip(hello.keys, found, strict=True)
        withheld = [key for key, settings in pairs if settings.timeout is not None]
        if withheld:
            fields = {"worker_id": hello.worker_id, "keys": ", ".join(withheld)[:_SHOWN]}
            _log.warning(
                "worker gets no tasks of queues with a timeout: it is too old", extra=fields
            )
        if len(withheld) == len(hello.keys):
            await self._refuse("timeouts", f"all queues have one: {_NO_TIMEOUTS}", CLOSE_TRY_LATER)
            return None
        return withheld

    def _without_others(self, hello: Hello, is_allowed: Callable[[str], bool]) -> Hello:
        """Return the hello without receipts of other connections for keys that this connection may not consume."""
        others = self._context.registry.others(self, hello.worker_id) if hello.holding else ()
        foreign = {
            delivery.receipt
            for other in others
            if isinstance(other, SocketAdmission)
            for delivery in other._session.held  # noqa: SLF001 - ``other`` is an object of the same class
            if not is_allowed(delivery.task.key)
        }
        retained = [receipt for receipt in hello.holding if receipt not in foreign]
        return msgspec.structs.replace(hello, holding=retained)

    async def _refuse(self, rule: str, message: str, code: int) -> None:
        for event in self._session.refuse(rule, message, code):
            match event:
                case SendFrames(text):
                    await self._channel.send(text)
                case CloseSocket(close_code, reason):
                    await self._channel.close(close_code, reason)


async def read_hello(session: ServerSession, channel: WebSocketChannel) -> Hello | CloseSocket:
    """Return the hello frame, or how to close the socket if the frame is invalid or late. Raises `ConnectionClosed`."""
    try:
        async with asyncio.timeout(HELLO_SECONDS):
            while True:
                for event in session.feed(await channel.receive()):
                    match event:
                        case Greeted(hello):
                            return hello
                        case SendFrames(text):
                            await channel.send(text)
                        case CloseSocket():
                            return event
    except TimeoutError:
        frame, close = session.refuse(
            "no_hello", "the first frame must be hello, and it must arrive in time", CLOSE_TIMEOUT
        )
        await channel.send(cast("SendFrames", frame).text)
        return cast("CloseSocket", close)

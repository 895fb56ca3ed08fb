"""WebSockets and HTTP operations for Prefect's task workers: task runs, events, the version and health."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from starlette.responses import Response
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket

from taskqueue_core.concurrency import first_completed
from taskqueue_core.consumer.outage import close
from taskqueue_core.errors import InvalidInput
from taskqueue_core.hooks import Connection as ConnectionInfo
from taskqueue_core.hooks import Identity
from taskqueue_server.api import system
from taskqueue_server.prefect import frames
from taskqueue_server.prefect.delivery import PrefectDelivery
from taskqueue_server.prefect.handshake import (
    PrefectConnection,
    accept_and_serve,
    receive_frame,
    wait_for_shutdown,
)
from taskqueue_server.routing.operations import Operation, RequestContext, answer
from taskqueue_server.worker_socket.session import SessionEnd, report_connection

PATH = "/api/task_runs/subscriptions/scheduled"
"""path of the WebSocket on which a Prefect worker receives its task runs"""
EVENTS_PATH = "/api/events/in"
"""Path of the WebSocket for events about the states of runs. The server reads and drops the events.

Without this WebSocket, a worker would log two errors for each run."""
FORBIDDEN_SECONDS = 5.0
"""seconds to wait before closing the socket of a worker that has no permission and would reconnect at once"""
_log = logging.getLogger("taskqueue.server.prefect")


async def socket(websocket: WebSocket) -> None:
    """Deliver task runs to one Prefect worker."""
    await accept_and_serve(websocket, _serve_runs)


async def _serve_runs(connection: PrefectConnection) -> SessionEnd:
    subscribe = await first_completed(
        receive_frame(frames.Subscribe, connection.channel), wait_for_shutdown(connection)
    )
    if isinstance(subscribe, SessionEnd):
        return subscribe
    keys = tuple(dict.fromkeys(subscribe.keys))

    def may_stay(identity: Identity) -> bool:
        return all(identity.is_allowed("consume", key) for key in keys)

    context = connection.context
    connection.worker_id = subscribe.worker_id
    context.registry.identify(connection, connection.worker_id)
    info = ConnectionInfo(
        connection_id=connection.connection_id, worker_id=connection.worker_id, keys=keys
    )
    with context.access.watch_access(connection.token, connection.peer, may_stay) as access_revoked:
        identity = context.access.identify(connection.token, connection.peer)
        if identity is None or not may_stay(identity):
            return await _reject(connection)
        try:
            subscription = context.backend.subscribe(keys, connection.worker_id)
        except InvalidInput as error:
            return SessionEnd(f"subscribe: invalid {error.field}", frames.CLOSE_PROTOCOL)
        try:
            delivery = PrefectDelivery(connection, subscription, access_revoked)
            return await report_connection(context.hooks, _log, info, delivery.run())
        finally:
            await close(subscription)


async def _reject(connection: PrefectConnection) -> SessionEnd:
    shown = {"connection_id": connection.connection_id, "worker_id": connection.worker_id}
    _log.warning("a worker has no permission to consume its keys", extra=shown)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FORBIDDEN_SECONDS):
            return await first_completed(connection.wait_closed(), wait_for_shutdown(connection))
    return SessionEnd("this token may not consume these keys", frames.CLOSE_POLICY)


async def events_socket(websocket: WebSocket) -> None:
    """Read and drop the events of one Prefect process."""
    await accept_and_serve(websocket, _drop_events)


async def _drop_events(connection: PrefectConnection) -> SessionEnd:
    # A sender of events has no worker id, so the registry gets an id made from the connection id.
    connection.worker_id = f"events:{connection.connection_id}"
    connection.context.registry.identify(connection, connection.worker_id)
    with connection.context.access.watch_access(
        connection.token, connection.peer, lambda identity: "consume" in identity.verbs
    ) as access_revoked:
        return await first_completed(
            connection.wait_closed(),
            wait_for_shutdown(connection),
            _wait_for_revocation(access_revoked),
        )


async def _wait_for_revocation(event: asyncio.Event) -> SessionEnd:
    await event.wait()
    return SessionEnd("the token is no longer valid", frames.CLOSE_POLICY)


async def version(call: RequestContext) -> Response:
    """Return the supported version of Prefect: a worker of another major version refuses to run."""
    return answer(call.context.settings.prefect_version)


async def health(_: RequestContext) -> Response:
    """Report that the server is running."""
    return answer(value=True)


OPERATIONS = (
    Operation(method="GET", path="/api/admin/version", handler=version, answers={200: str}),
    Operation(method="GET", path="/api/health", handler=health, answers={200: bool}),
    Operation(method="GET", path="/api/ready", handler=system.ready, answers={200: None}),
)
SOCKETS = (WebSocketRoute(PATH, socket), WebSocketRoute(EVENTS_PATH, events_socket))

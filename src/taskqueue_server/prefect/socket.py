"""``/api/task_runs/subscriptions/scheduled``: what a worker of Prefect subscribes to."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from starlette.websockets import WebSocket

from taskqueue_core.concurrency import first_completed
from taskqueue_core.consumer.outage import close
from taskqueue_core.errors import InvalidInput
from taskqueue_core.hooks import Connection as ConnectionInfo
from taskqueue_core.hooks import Identity
from taskqueue_server.prefect import frames
from taskqueue_server.prefect.delivery import PrefectDelivery
from taskqueue_server.prefect.handshake import (
    Guest,
    PrefectSessionEnd,
    receive_frame,
    restart,
    welcome,
)

PATH = "/api/task_runs/subscriptions/scheduled"
FORBIDDEN_SECONDS = 5.0
"""before a worker that may not have its keys is sent away: it says nothing to its user, and is back at once"""
_log = logging.getLogger("taskqueue.server.prefect")


async def socket(websocket: WebSocket) -> None:
    """Serve one worker."""
    await welcome(websocket, _visit)


async def _visit(guest: Guest) -> PrefectSessionEnd:
    subscribe = await first_completed(
        receive_frame(frames.Subscribe, guest.channel), restart(guest)
    )
    if isinstance(subscribe, PrefectSessionEnd):
        return subscribe
    keys = tuple(dict.fromkeys(subscribe.keys))

    def may_stay(identity: Identity) -> bool:
        return all(identity.is_allowed("consume", key) for key in keys)

    context = guest.context
    guest.worker_id = subscribe.worker_id
    context.registry.identify(guest, guest.worker_id)
    info = ConnectionInfo(connection_id=guest.connection_id, worker_id=guest.worker_id, keys=keys)
    with context.access.watch_access(guest.token, guest.peer, may_stay) as dismissed:
        identity = context.access.identify(guest.token, guest.peer)
        if identity is None or not may_stay(identity):
            return await _reject(guest)
        try:
            subscription = context.backend.subscribe(keys, guest.worker_id)
        except InvalidInput as error:
            return PrefectSessionEnd(
                f"subscribe: {error.field} is not allowed", frames.CLOSE_PROTOCOL
            )
        try:
            return await _converse(PrefectDelivery(guest, subscription, dismissed), guest, info)
        finally:
            await close(subscription)


async def _reject(guest: Guest) -> PrefectSessionEnd:
    shown = {"connection_id": guest.connection_id, "worker_id": guest.worker_id}
    _log.warning("a worker may not consume its keys", extra=shown)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FORBIDDEN_SECONDS):
            return await first_completed(guest.wait_closed(), restart(guest))
    return PrefectSessionEnd("this token may not consume these keys", frames.CLOSE_POLICY)


async def _converse(talk: PrefectDelivery, guest: Guest, info: ConnectionInfo) -> PrefectSessionEnd:
    hooks = guest.context.hooks
    shown = {"connection_id": info.connection_id, "worker_id": info.worker_id}
    _log.info("worker connected", extra={**shown, "keys": len(info.keys)})
    hooks.fire("worker_connected", connection=info)
    reason = "cancelled"
    try:
        end = await talk.run()
        reason = end.reason
        return end
    finally:
        _log.info("worker disconnected", extra={**shown, "reason": reason})
        hooks.fire("worker_disconnected", connection=info, reason=reason)

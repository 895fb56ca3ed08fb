"""Delivering task runs one at a time: send a run, wait for its ack, settle the run, then receive the next."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial

import msgspec

from taskqueue_core.backend import Capability, Subscription
from taskqueue_core.capabilities import has, revocation_of
from taskqueue_core.concurrency import first_completed, wait_forever
from taskqueue_core.consumer.outage import OutageRetry
from taskqueue_core.consumer.settle import Settler
from taskqueue_core.errors import SubscriptionClosed
from taskqueue_core.retry import Rejected
from taskqueue_core.tasks import Delivery
from taskqueue_server.prefect import frames
from taskqueue_server.prefect.handshake import PrefectConnection
from taskqueue_server.prefect.task_run import refusal
from taskqueue_server.worker_socket.session import SessionEnd
from taskqueue_server.worker_socket.websocket import ConnectionClosed

BAD_TASK_RUN = "bad_task_run"
"""reason of a dead letter whose payload is not a valid task run; a Prefect worker would exit on such a payload"""
_ACK_SECONDS = 0.5
"""seconds to wait for the ack of the last run before the socket is closed; a worker with a free slot acks at once"""
_SETTLE_SECONDS = 2.0
"""seconds allowed for settling the last ack, after a first wait that ends after one lease time or on shutdown"""
_log = logging.getLogger("taskqueue.server.prefect")


class _Sent(msgspec.Struct, frozen=True):
    delivery: Delivery
    mark: int
    """number of the ping sent before the run; a worker that has not answered this ping has not read the run"""


class PrefectDelivery:
    """Delivers task runs to one Prefect worker, each after the ack of the previous run. Call `run` only once."""

    def __init__(
        self,
        connection: PrefectConnection,
        subscription: Subscription,
        access_revoked: asyncio.Event,
    ) -> None:
        """Create a delivery that ends when ``access_revoked`` is set, which means that the token is no longer valid."""
        self._connection = connection
        self._context = connection.context
        self._channel = connection.channel
        self._pings = connection.pings
        self._subscription = subscription
        self._access_revoked = access_revoked
        self._outage = OutageRetry(self._log_outage)
        self._settlements = Settler(connection.context.backend, subscription, self._outage)
        self._sent: _Sent | None = None
        self._settling: asyncio.Task[dict[str, bool]] | None = None
        self._acked = asyncio.Event()

    async def run(self) -> SessionEnd:
        """Deliver runs until the session ends, and close the socket.

        The caller must then close the subscription, which releases a run that was not acked.
        """
        try:
            end = await self._serve()
            # Close the socket before the run is released: a worker that has read the close frame cannot ack a run that
            # is then delivered to another worker.
            if end.code is not None:
                await self._channel.close(end.code, end.reason)
            await self._finish_settling()
            return SessionEnd(end.reason)
        finally:
            if self._settling is not None:
                self._settling.cancel()
                await asyncio.gather(self._settling, return_exceptions=True)

    async def _serve(self) -> SessionEnd:
        try:
            return await first_completed(
                self._read(),
                self._channel.lost(),
                self._deliver(),
                self._drain(),
                self._watch_access(),
                self._watch_revocations(),
            )
        except frames.Violation as violation:
            return SessionEnd(str(violation), frames.CLOSE_PROTOCOL)
        except ConnectionClosed as gone:
            return SessionEnd(str(gone))
        except SubscriptionClosed:
            return SessionEnd("restart", frames.CLOSE_RESTART)
        except Exception:  # noqa: BLE001 - a bug here must not end other connections
            _log.exception("unexpected error in the connection of a worker")
            return SessionEnd("internal", frames.CLOSE_INTERNAL)

    async def _finish_settling(self) -> None:
        # The worker executes a run that it has acked. If the ack were not settled, the run would be executed twice.
        if self._settling is not None:
            answer = asyncio.wait([self._settling], timeout=self._context.settings.lease)
            await first_completed(answer, self._context.draining.wait())
            await asyncio.wait([self._settling], timeout=_SETTLE_SECONDS)

    # `_serve` runs `_read`, `_deliver`, `_drain` and the `_watch_*` methods concurrently. The first that returns or
    # raises ends the session.

    async def _read(self) -> SessionEnd:
        # Read continuously, because a closed socket or a pong is noticed only while reading.
        while True:
            kind = frames.answered(await self._channel.receive())
            sent = self._sent
            if kind == "quit":
                return SessionEnd("quit", frames.CLOSE_QUIT)
            if sent is None or self._pings.passed() < sent.mark:
                raise frames.Violation("ack: no run is waiting for an ack")
            self._sent = None
            done = [(sent.delivery, None)]
            self._settling = asyncio.create_task(self._settlements.ack(done))
            self._acked.set()

    async def _deliver(self) -> SessionEnd:
        while not self._is_leaving():
            self._connection.credit = 1
            received = await self._outage.retry_until_available(
                partial(self._subscription.receive, 1, None)
            )
            self._connection.credit = 0
            for delivery in received.deliveries:
                if self._is_leaving():
                    break  # closing the subscription releases the delivery, which was not sent
                why = refusal(delivery.task)
                if why is None:
                    await self._deliver_run(delivery)
                else:
                    _log.warning(
                        "a task is not a valid Prefect task run, and becomes a dead letter",
                        extra={"reason": BAD_TASK_RUN},
                    )
                    await self._settlements.settle_outcomes(
                        [(delivery, Rejected(BAD_TASK_RUN, why))]
                    )
        return await wait_forever()

    async def _deliver_run(self, delivery: Delivery) -> None:
        self._acked.clear()
        self._sent = _Sent(delivery, self._pings.mark())
        self._connection.busy = 1
        await self._channel.send(delivery.task.payload.decode())
        await self._acked.wait()
        if self._settling is not None:
            outcomes = await asyncio.shield(self._settling)
            if not all(outcomes.values()):
                _log.warning("an ack came too late", extra={"reason": "lease_lost"})
        self._connection.busy = 0

    async def _drain(self) -> SessionEnd:
        await self._context.draining.wait()
        await self._wait_for_last_ack(min(_ACK_SECONDS, self._context.drain_remaining))
        return SessionEnd("restart", frames.CLOSE_RESTART)

    async def _watch_access(self) -> SessionEnd:
        await self._access_revoked.wait()
        await self._wait_for_last_ack(_ACK_SECONDS)
        return SessionEnd("the token is no longer valid", frames.CLOSE_POLICY)

    def _is_leaving(self) -> bool:
        return self._context.draining.is_set() or self._access_revoked.is_set()

    async def _wait_for_last_ack(self, seconds: float) -> None:
        # Without this wait, a run that the worker is about to ack would be executed twice.
        if self._sent is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._acked.wait()

    async def _watch_revocations(self) -> SessionEnd:
        if has(self._context.backend, Capability.REVOCATION):
            revocation = revocation_of(self._context.backend, self._subscription)
            while receipts := await self._outage.retry_until_available(revocation.revoked):
                if self._sent is not None and self._sent.delivery.receipt in receipts:
                    # A worker whose socket is closed drops a run that it has not acked, and reconnects.
                    return SessionEnd("revoked", frames.CLOSE_RESTART)
        return await wait_forever()

    async def _log_outage(self, ok: bool, reason: str) -> None:  # noqa: FBT001 - `OutageRetry` passes ``ok`` by position
        # Prefect's protocol has no frame that reports an outage, so it is only logged; workers wait.
        if ok:
            _log.info("store available again")
        else:
            _log.warning("store unavailable", extra={"reason": reason})

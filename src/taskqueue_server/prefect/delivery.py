"""One task run after the other: send it, wait for its ack, settle, and only then take the next."""

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
from taskqueue_core.protocol.prefect_task_run import refusal
from taskqueue_core.retry import Rejected
from taskqueue_core.tasks import Delivery
from taskqueue_server.prefect import frames
from taskqueue_server.prefect.handshake import Guest, PrefectSessionEnd
from taskqueue_server.worker_socket.websocket import ConnectionClosed

BAD_TASK_RUN = "bad_task_run"
"""the reason of a dead letter that no worker of Prefect would bear"""
_ACK_SECONDS = 0.5
"""for the ack of what was just sent, once an end is near: a worker that has room gives it at once"""
_SETTLE_SECONDS = 2.0
"""for the settlement of an ack that has come, when the server leaves; otherwise it may take as long as a lease"""
_log = logging.getLogger("taskqueue.server.prefect")


class _Sent(msgspec.Struct, frozen=True):
    delivery: Delivery
    mark: int
    """who has not seen it has not seen the delivery"""


class PrefectDelivery:
    """Hands task runs over to one worker, which holds one without an ack at the most. Runs once."""

    def __init__(
        self, guest: Guest, subscription: Subscription, access_revoked: asyncio.Event
    ) -> None:
        """``access_revoked`` is set when the worker's token is not good any more."""
        self._guest = guest
        self._context = guest.context
        self._channel = guest.channel
        self._pings = guest.pings
        self._subscription = subscription
        self._dismissed = access_revoked
        self._store = OutageRetry(self._log_outage)
        self._settlements = Settler(guest.context.backend, subscription, self._store)
        self._sent: _Sent | None = None
        self._settling: asyncio.Task[dict[str, bool]] | None = None
        self._acked = asyncio.Event()

    async def run(self) -> PrefectSessionEnd:
        """Serve until the end, farewell included. What has no ack goes back as the subscription is closed, not here."""
        try:
            end = await self._talk()
            # The farewell goes first: a worker that has read it can give no ack any more for what another gets.
            if end.code is not None:
                await self._channel.close(end.code, end.reason)
            await self._settle()
            return PrefectSessionEnd(end.reason)
        finally:
            if self._settling is not None:
                self._settling.cancel()
                await asyncio.gather(self._settling, return_exceptions=True)

    async def _talk(self) -> PrefectSessionEnd:
        try:
            return await first_completed(
                self._read(),
                self._notice(),
                self._deliver(),
                self._drain(),
                self._dismiss(),
                self._revoke(),
            )
        except frames.Violation as violation:
            return PrefectSessionEnd(str(violation), frames.CLOSE_PROTOCOL)
        except ConnectionClosed as gone:
            return PrefectSessionEnd(str(gone))
        except SubscriptionClosed:
            return PrefectSessionEnd("restart", frames.CLOSE_RESTART)
        except Exception:  # noqa: BLE001 - a fault of ours must not take other connections along
            _log.exception("a connection failed")
            return PrefectSessionEnd("internal", frames.CLOSE_INTERNAL)

    async def _settle(self) -> None:
        # The worker runs what it has acked: whoever would get it again would run it a second time.
        if self._settling is not None:
            answer = asyncio.wait([self._settling], timeout=self._context.settings.lease)
            await first_completed(answer, self._context.draining.wait())
            await asyncio.wait([self._settling], timeout=_SETTLE_SECONDS)

    # The tasks; each returns or raises when it knows that it is over.

    async def _read(self) -> PrefectSessionEnd:
        # Always, or else neither an end nor a pong would be noticed.
        while True:
            kind = frames.answered(await self._channel.receive())
            sent = self._sent
            if kind == "quit":
                return PrefectSessionEnd("quit", frames.CLOSE_QUIT)
            if sent is None or self._pings.passed() < sent.mark:
                raise frames.Violation("ack: no run was sent")
            self._sent = None
            done = [(sent.delivery, None)]
            self._settling = asyncio.create_task(self._settlements.ack(done))
            self._acked.set()

    async def _notice(self) -> PrefectSessionEnd:
        raise await self._channel.lost()

    async def _deliver(self) -> PrefectSessionEnd:
        while not self._is_leaving():
            self._guest.credit = 1
            received = await self._store.retry_until_available(
                partial(self._subscription.receive, 1, None)
            )
            self._guest.credit = 0
            for delivery in received.deliveries:
                if self._is_leaving():
                    break  # it came too late, and goes back unseen
                why = refusal(delivery.task)
                if why is None:
                    await self._hand_over(delivery)
                else:
                    _log.warning("no task run for a worker", extra={"reason": BAD_TASK_RUN})
                    await self._settlements.settle_outcomes(
                        [(delivery, Rejected(BAD_TASK_RUN, why))]
                    )
        return await wait_forever()

    async def _hand_over(self, delivery: Delivery) -> None:
        self._acked.clear()
        self._sent = _Sent(delivery, self._pings.mark())
        self._guest.busy = 1
        await self._channel.send(delivery.task.payload.decode())
        await self._acked.wait()
        if self._settling is not None:
            outcomes = await asyncio.shield(self._settling)
            if not all(outcomes.values()):
                _log.warning("an ack came too late", extra={"reason": "lease_lost"})
        self._guest.busy = 0

    async def _drain(self) -> PrefectSessionEnd:
        await self._context.draining.wait()
        await self._last_ack(min(_ACK_SECONDS, self._context.drain_remaining))
        return PrefectSessionEnd("restart", frames.CLOSE_RESTART)

    async def _dismiss(self) -> PrefectSessionEnd:
        await self._dismissed.wait()
        await self._last_ack(_ACK_SECONDS)
        return PrefectSessionEnd("the token is no longer valid", frames.CLOSE_POLICY)

    def _is_leaving(self) -> bool:
        return self._context.draining.is_set() or self._dismissed.is_set()

    async def _last_ack(self, seconds: float) -> None:
        # What a worker is just about to ack would otherwise run twice.
        if self._sent is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._acked.wait()

    async def _revoke(self) -> PrefectSessionEnd:
        if has(self._context.backend, Capability.REVOCATION):
            revocation = revocation_of(self._context.backend, self._subscription)
            while receipts := await self._store.retry_until_available(revocation.revoked):
                if self._sent is not None and self._sent.delivery.receipt in receipts:
                    # A worker drops what it has not acked when it is sent away, and comes again.
                    return PrefectSessionEnd("revoked", frames.CLOSE_RESTART)
        return await wait_forever()

    async def _log_outage(self, ok: bool, reason: str) -> None:  # noqa: FBT001 - the shape is the link's
        # There is no frame for this: workers wait.
        if ok:
            _log.info("store available again")
        else:
            _log.warning("store unavailable", extra={"reason": reason})

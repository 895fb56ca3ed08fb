"""The sender of callbacks: a consumer of their queue."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import ssl
import time
from collections.abc import Callable
from functools import partial

import msgspec

from taskqueue_core.backend import Backend, Subscription
from taskqueue_core.capabilities import control_of
from taskqueue_core.consumer.outage import OutageRetry, close
from taskqueue_core.consumer.settle import settle
from taskqueue_core.errors import InvalidInput, TaskQueueError
from taskqueue_core.retry import Failed, Outcome, Rejected, ScheduleRetry, Success, decide
from taskqueue_core.tasks import Delivery, Published, Settled, State, Task
from taskqueue_dispatch.callbacks.policy import policy_of, prepare
from taskqueue_dispatch.callbacks.records import CallbackReceipt, CallbackRecord, record_of
from taskqueue_dispatch.callbacks.signature import Signer
from taskqueue_dispatch.callbacks.tasks import CALLBACK_URL, JOB, QUEUE, callback_task
from taskqueue_dispatch.config import DispatchSettings
from taskqueue_dispatch.names import CALLBACKS
from taskqueue_dispatch.outbound_http import (
    CachedLookup,
    NameUnknown,
    NotReached,
    PostReply,
    Resolve,
    check_url,
    look_up,
    post,
    trusted,
)

_FIELD = "callback_url"
_FINAL_ATTEMPT = 0.5
"""seconds for what is told to the store in the end"""
_GRACE = 2.0
"""seconds that what is being sent may take when the sender is stopped"""
_SUCCESS = range(200, 300)
_GONE = 410
_THROTTLED = {429, 502, 504}
_THROTTLE = 30.0
"""seconds at least after an answer that asks for fewer requests"""
_LONGEST = 6 * 3600.0
"""that a receiver may ask to be left alone for"""
_LOOK_AGAIN, _SELDOM = 1.0, 30.0
"""seconds until a job that is past its deadline, and on a server or not looked at yet, is looked at again"""
_log = logging.getLogger("taskqueue.dispatch.callbacks")


class Sender:
    """Sends callbacks until they are taken, refused for good, or out of attempts: then they are dead letters."""

    def __init__(
        self,
        backend: Backend,
        settings: DispatchSettings,
        *,
        resolve: Resolve = look_up,
        tls: ssl.SSLContext | None = None,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        """``tls`` is what verifies receivers, instead of the system's authorities; ``uniform`` gives 0 <= x < 1.

        Raises `ConfigurationError` for secrets, ports or networks that are none.
        """
        self._backend = backend
        self._control = control_of(backend)
        self._settings = settings
        self._policy = policy_of(settings)
        self._signer = Signer(settings.webhook_secrets)
        self._resolve = resolve
        self._recently = CachedLookup(resolve)
        self._tls = tls
        self._uniform = uniform
        self._store = OutageRetry(_log_outcome)
        self._sending: set[asyncio.Task[None]] = set()

    async def check(self, url: str) -> None:
        """Check a URL before a job with it is taken. Raises `InvalidInput` for one that would be refused.

        One whose name can't be looked up just now is let pass: it is checked again when it is called.
        """
        try:
            await check_url(url, self._policy, field=_FIELD, resolve=self._recently)
        except NameUnknown:
            raise InvalidInput(
                _FIELD, "a host that does not exist", "hosts with public addresses"
            ) from None
        except NotReached:
            return

    async def record(self, job_id: str) -> CallbackRecord | None:
        """Return what became of a job's callback; ``None`` where there is none, or it was forgotten."""
        return await record_of(self._backend, job_id)

    async def run(self) -> None:
        """Send until cancelled. An outage of the store delays; raises `SubscriptionClosed` where the backend closes.

        Cancelled, it lets what is being sent end for two seconds; the rest is handed back, and sent again.
        """
        if not self._signer.signs:
            _log.warning(
                "callbacks are not signed, so receivers cannot verify them; set TASKQUEUE_DISPATCH_WEBHOOK_SECRETS"
            )
        tls = self._tls or trusted()
        await self._store.retry_until_available(partial(prepare, self._backend, self._settings))
        subscription = self._backend.subscribe([CALLBACKS], f"{CALLBACKS}-{secrets.token_hex(4)}")
        try:
            await self._consume(subscription, tls)
        finally:
            await self._stop(subscription)

    async def _consume(self, subscription: Subscription, tls: ssl.SSLContext) -> None:
        while True:
            room = self._settings.callbacks_at_once - len(self._sending)
            if not room:
                await asyncio.wait(self._sending, return_when=asyncio.FIRST_COMPLETED)
                continue
            received = await self._store.retry_until_available(
                partial(subscription.receive, room, None)
            )
            for delivery in received.deliveries:
                task = asyncio.create_task(self._carry(subscription, delivery, tls))
                self._sending.add(task)
                task.add_done_callback(self._sending.discard)

    async def _stop(self, subscription: Subscription) -> None:
        try:
            if self._sending:
                await asyncio.wait(self._sending, timeout=_GRACE)
        finally:
            ending = list(self._sending)
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)
            await self._recently.aclose()
            with contextlib.suppress(TimeoutError):  # a store that is away has its lease end
                async with asyncio.timeout(_FINAL_ATTEMPT):
                    await close(subscription)

    async def _carry(
        self, subscription: Subscription, delivery: Delivery, tls: ssl.SSLContext
    ) -> None:
        try:
            if not await self._is_due(subscription, delivery):
                return
            outcome, after = await self._attempt(delivery, tls)
        except Exception as error:  # noqa: BLE001 - one callback must not end the others
            # Its text may have the URL in it.
            _log.warning("could not send a callback", extra={"reason": type(error).__name__})
            outcome, after = Failed("internal error of the callback sender"), 0.0
        try:
            settled = await self._store.retry_until_available(
                partial(self._settle, subscription, delivery, outcome, after)
            )
        except TaskQueueError as error:
            _log.warning("could not settle a callback", extra={"code": error.code})
        else:
            if not settled.ok:
                _log.info("another process took over a callback")

    async def _is_due(self, subscription: Subscription, delivery: Delivery) -> bool:
        """Return whether a callback is to be sent; one that tells of an expiry goes, or waits, by its job's state."""
        task = delivery.task
        if QUEUE not in task.headers:
            return True
        poll = partial(self._control.statuses, task.headers[QUEUE], task.headers[JOB])
        (status,) = await self._store.retry_until_available(poll)
        if status is not None and status.state is State.EXPIRED:
            return True
        # A job that is done was told of, but for one whose dispatcher was killed in between.
        done = status is not None and status.state is State.DONE
        if (status is not None and status.state.live) or (
            done and not await self._ensure_reported(task)
        ):
            pause = min(delivery.attempt * _LOOK_AGAIN, _SELDOM)
            later = ScheduleRetry(pause, "the job goes on")
            await self._store.retry_until_available(
                partial(settle, self._backend, subscription, delivery, later)
            )
        else:
            await self._store.retry_until_available(
                partial(self._control.cancel, CALLBACKS, task.id)
            )
        return False

    async def _ensure_reported(self, watch: Task) -> bool:
        """Have it told, if it was not yet, that the job that is watched is done; say whether that is stored."""
        key, job_id = watch.headers[QUEUE], watch.headers[JOB]
        (result,) = await self._store.retry_until_available(
            partial(self._control.results, key, job_id)
        )
        job = Task(key=key, id=job_id, headers={CALLBACK_URL: watch.headers[CALLBACK_URL]})
        publish = partial(self._backend.publisher.publish, callback_task(job, "done", result, None))
        (confirmation,) = await self._store.retry_until_available(publish)
        return confirmation.status is not Published.REFUSED

    async def _attempt(self, delivery: Delivery, tls: ssl.SSLContext) -> tuple[Outcome, float]:
        task = delivery.task
        began = time.monotonic()
        try:
            url = task.headers.get(CALLBACK_URL, "")
            position = await check_url(url, self._policy, field=_FIELD, resolve=self._resolve)
            headers = self._signer.headers(task.id, self._backend.now(), task.payload)
            reply = await post(
                position,
                task.payload,
                headers | {"content-type": "application/json", "user-agent": "taskqueue"},
                tls=tls,
                within=self._settings.callback_timeout,
            )
        except InvalidInput as error:
            return Rejected("refused", str(error)), 0.0
        except NotReached as error:
            return Failed(str(error)), 0.0
        return _classify(reply, time.monotonic() - began)

    async def _settle(
        self, subscription: Subscription, delivery: Delivery, outcome: Outcome, after: float
    ) -> Settled:
        policy = (await self._control.settings(CALLBACKS)).retry
        verb = decide(outcome, delivery, policy, self._uniform)
        if isinstance(verb, ScheduleRetry):
            verb = ScheduleRetry(max(verb.delay, after), verb.error)
        return await settle(self._backend, subscription, delivery, verb)


def _classify(reply: PostReply, seconds: float) -> tuple[Outcome, float]:
    if reply.status in _SUCCESS:
        receipt = CallbackReceipt(
            http_status=reply.status, length=reply.length, seconds=round(seconds, 3)
        )
        return Success(msgspec.json.encode(receipt)), 0.0
    error = f"HTTP {reply.status} and {reply.length} bytes"
    if reply.status == _GONE:
        return Rejected("gone", error), 0.0
    least = _THROTTLE if reply.status in _THROTTLED else 0.0
    after = least if reply.retry_after is None else reply.retry_after
    return Failed(error), min(after, _LONGEST)


async def _log_outcome(there: bool, code: str) -> None:  # noqa: FBT001 - as `OutageRetry` calls it
    if there:
        _log.info("store available again; sending callbacks")
    else:
        _log.warning("store unavailable; callbacks wait", extra={"code": code})

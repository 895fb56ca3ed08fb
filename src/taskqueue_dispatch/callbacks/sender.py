"""The sender of callbacks: it consumes their queue and sends them over HTTP."""

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
from ipaddress import ip_network

import msgspec
from msgspec import structs

from taskqueue_core.backend import Backend, Capability, Subscription
from taskqueue_core.capabilities import Order, QueueSettings, control_of, has
from taskqueue_core.consumer.outage import OutageRetry, close
from taskqueue_core.consumer.settle import settle
from taskqueue_core.errors import (
    ConfigurationError,
    InvalidInput,
    SettingsConflict,
    TaskQueueError,
)
from taskqueue_core.limits import in_bytes
from taskqueue_core.retry import (
    Failed,
    Outcome,
    Rejected,
    RetryPolicy,
    ScheduleRetry,
    Success,
    decide,
)
from taskqueue_core.tasks import Delivery, Published, Settled, State, Task
from taskqueue_dispatch.callbacks.receivers import Receivers, share_of
from taskqueue_dispatch.callbacks.records import CallbackReceipt, CallbackRecord, record_of
from taskqueue_dispatch.callbacks.signature import Signer
from taskqueue_dispatch.callbacks.tasks import CALLBACK_URL, JOB, QUEUE, callback_task, host_of
from taskqueue_dispatch.config import DispatchSettings
from taskqueue_dispatch.names import CALLBACKS
from taskqueue_dispatch.outbound_http.dns import (
    CachedLookup,
    NameUnknown,
    NotReached,
    Resolve,
    look_up,
)
from taskqueue_dispatch.outbound_http.post import PostReply, post, trusted
from taskqueue_dispatch.outbound_http.url_policy import UrlPolicy, check_url

_FIELD = "callback_url"
_FINAL_SECONDS = 0.5
"""maximum number of seconds for the last store call during shutdown"""
_GRACE_SECONDS = 2.0
"""maximum number of seconds that requests in progress get to finish during shutdown"""
_SUCCESS = range(200, 300)
_GONE = 410
_THROTTLED = {429, 502, 504}
_THROTTLE_SECONDS = 30.0
"""delay in seconds after a response with a status in ``_THROTTLED`` and without ``Retry-After``"""
_MAX_RETRY_AFTER = 6 * 3600.0
"""maximum number of seconds for which a ``Retry-After`` is obeyed; a larger value is reduced to this one"""
_POLL_SECONDS, _MAX_POLL_SECONDS = 1.0, 30.0
"""minimum and maximum seconds between checks of a job that is past its deadline but has not ended"""
_RETRY = RetryPolicy(base=5.0, cap=6 * 3600.0, jitter=0.2)
_STORED_SECONDS = 86_400.0
"""seconds for which the outcome of a callback is kept, and during which a callback with the same id is dropped"""
_MAX_PORT = 65_535
_log = logging.getLogger("taskqueue.dispatch.callbacks")


def policy_of(settings: DispatchSettings) -> UrlPolicy:
    """Return the rules for URLs of callbacks. Raises `ConfigurationError` for an invalid port or network."""
    if not all(1 <= port <= _MAX_PORT for port in settings.callback_ports):
        raise ConfigurationError(
            f"TASKQUEUE_DISPATCH_CALLBACK_PORTS: a port must be from 1 to {_MAX_PORT}"
        )
    try:
        networks = tuple(map(ip_network, settings.callback_networks))
    except ValueError as error:
        raise ConfigurationError(f"TASKQUEUE_DISPATCH_CALLBACK_NETWORKS: {error}") from None
    ports = frozenset(settings.callback_ports)
    return UrlPolicy(ports=ports, http=settings.callback_http, networks=networks)


async def prepare(backend: Backend, settings: DispatchSettings) -> None:
    """Configure the queue of callbacks: the number of attempts and the share of a tenant come from ``settings``.

    The order is fair if the backend supports this. All other settings get their defaults when the queue is created;
    after that, an operator's changes are kept.
    """
    control = control_of(backend)
    while True:
        current = await control.settings(CALLBACKS)
        changed = _applied(current, settings, fair=has(backend, Capability.FAIR_ORDER))
        if changed == current:
            return
        with contextlib.suppress(SettingsConflict):
            await control.configure(CALLBACKS, changed)
            return


class Sender:
    """A consumer that sends callbacks until they succeed.

    A callback becomes a dead letter if its URL is not allowed, the receiver answers 410, or its attempts are used up.
    """

    def __init__(
        self,
        backend: Backend,
        settings: DispatchSettings,
        *,
        resolve: Resolve = look_up,
        tls: ssl.SSLContext | None = None,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        """Create a sender without any I/O.

        ``tls`` is used to verify receivers instead of the system's certificate authorities; ``uniform`` returns random
        numbers from 0 to 1. Raises `ConfigurationError` for an invalid secret, port or network.
        """
        self._backend = backend
        self._control = control_of(backend)
        self._settings = settings
        self._policy = policy_of(settings)
        self._signer = Signer(settings.webhook_secrets)
        self._resolve = resolve
        self._cached_lookup = CachedLookup(resolve)
        self._tls = tls
        self._uniform = uniform
        self._store = OutageRetry(_log_outage)
        self._receivers = Receivers(settings)
        self._sending: set[asyncio.Task[None]] = set()

    async def check(self, url: str) -> None:
        """Check the callback URL of a job that is being submitted. Raises `InvalidInput` if the URL is not allowed.

        If its host cannot be resolved now, the URL is accepted, because it is checked again before each request.
        """
        try:
            await check_url(url, self._policy, field=_FIELD, resolve=self._cached_lookup)
        except NameUnknown:
            raise InvalidInput(
                _FIELD, "a host that does not exist", "hosts with public addresses"
            ) from None
        except NotReached:
            return

    async def record(self, job_id: str) -> CallbackRecord | None:
        """Return the record of a job's newest callback, or ``None`` if there is none or it has expired."""
        return await record_of(self._backend, job_id)

    async def run(self) -> None:
        """Send callbacks until cancelled. Keep trying during an outage of the store.

        When cancelled, wait up to two seconds for requests in progress, and release the other callbacks, which are sent
        later. Raises `SubscriptionClosed` if the backend is closed.
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
                pause = self._receivers.cut()
                await asyncio.wait(
                    self._sending, timeout=pause, return_when=asyncio.FIRST_COMPLETED
                )
                continue
            received = await self._store.retry_until_available(
                partial(subscription.receive, room, None)
            )
            for delivery in received.deliveries:
                task = asyncio.create_task(self._deliver(subscription, delivery, tls))
                self._sending.add(task)
                task.add_done_callback(self._sending.discard)

    async def _stop(self, subscription: Subscription) -> None:
        try:
            if self._sending:
                await asyncio.wait(self._sending, timeout=_GRACE_SECONDS)
        finally:
            remaining = list(self._sending)
            for task in remaining:
                task.cancel()
            await asyncio.gather(*remaining, return_exceptions=True)
            await self._cached_lookup.aclose()
            # If this call times out, for example during an outage, the leases of the callbacks expire by themselves.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FINAL_SECONDS):
                    await close(subscription)

    async def _deliver(
        self, subscription: Subscription, delivery: Delivery, tls: ssl.SSLContext
    ) -> None:
        try:
            if not await self._is_due(subscription, delivery):
                return
            if not await self._receivers.turn(_host_of(delivery)):
                await self._postpone(subscription, delivery)
                return
            outcome, after = await self._attempt(delivery, tls)
        except Exception as error:  # noqa: BLE001 - an error in one callback must not affect the others
            # Log only the type of the error, because its text may contain the URL.
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
                _log.info("a callback was not settled: this process no longer holds it")

    async def _postpone(self, subscription: Subscription, delivery: Delivery) -> None:
        """Try a callback again later, because its host hangs or has enough callbacks. The attempt does not count."""
        delay = self._receivers.postponed(delivery.task.id)
        later = ScheduleRetry(delay, "the receiver has not answered earlier callbacks yet")
        await self._store.retry_until_available(
            partial(settle, self._backend, subscription, delivery, later)
        )

    async def _is_due(self, subscription: Subscription, delivery: Delivery) -> bool:
        """Return whether to send a callback now. An expiry callback is sent only if its job has expired.

        If the job has not ended, or the callback that reports its success cannot be stored now, the check is repeated
        later. In all other cases, the expiry callback is cancelled.
        """
        task = delivery.task
        if QUEUE not in task.headers:
            return True
        statuses = partial(self._control.statuses, task.headers[QUEUE], task.headers[JOB])
        (status,) = await self._store.retry_until_available(statuses)
        state = None if status is None else status.state
        if state is State.EXPIRED:
            return True
        # The callback of a done job is stored already, unless the dispatcher was killed before storing it.
        unreported = state is State.DONE and not await self._ensure_reported(task)
        if unreported or (state is not None and state.live):
            delay = min(delivery.attempt * _POLL_SECONDS, _MAX_POLL_SECONDS)
            later = ScheduleRetry(delay, "the job has not expired")
            await self._store.retry_until_available(
                partial(settle, self._backend, subscription, delivery, later)
            )
        else:
            await self._store.retry_until_available(
                partial(self._control.cancel, CALLBACKS, task.id)
            )
        return False

    async def _ensure_reported(self, expiry: Task) -> bool:
        """Store the callback of a done job, unless it is stored already. Return False if the queue refuses it."""
        key, job_id = expiry.headers[QUEUE], expiry.headers[JOB]
        (result,) = await self._store.retry_until_available(
            partial(self._control.results, key, job_id)
        )
        url = expiry.headers[CALLBACK_URL]
        job = Task(key=key, id=job_id, headers={CALLBACK_URL: url}, tenant=expiry.tenant)
        publish = partial(self._backend.publisher.publish, callback_task(job, "done", result, None))
        (confirmation,) = await self._store.retry_until_available(publish)
        return confirmation.status is not Published.REFUSED

    async def _attempt(self, delivery: Delivery, tls: ssl.SSLContext) -> tuple[Outcome, float]:
        task = delivery.task
        began = time.monotonic()
        try:
            async with self._receivers.request(_host_of(delivery)):
                url = task.headers.get(CALLBACK_URL, "")
                checked = await check_url(url, self._policy, field=_FIELD, resolve=self._resolve)
                headers = self._signer.headers(task.id, self._backend.now(), task.payload)
                reply = await post(
                    checked,
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
        postponed = self._receivers.times_postponed(delivery.task.id)
        counted = structs.replace(delivery, prior=delivery.prior + postponed)
        verb = decide(outcome, counted, policy, self._uniform)
        if isinstance(verb, ScheduleRetry):
            verb = ScheduleRetry(max(verb.delay, after), verb.error)
        else:
            self._receivers.forget(delivery.task.id)
        return await settle(self._backend, subscription, delivery, verb)


def _host_of(delivery: Delivery) -> str:
    return host_of(delivery.task.headers.get(CALLBACK_URL, ""))


def _applied(current: QueueSettings, settings: DispatchSettings, *, fair: bool) -> QueueSettings:
    fields = current.model_dump()
    if not current.version:
        fields |= {"result_ttl": _STORED_SECONDS, "dedupe_window": _STORED_SECONDS}
    retry = current.retry if current.version else _RETRY
    fields["retry"] = retry.model_copy(update={"max_attempts": settings.callback_attempts})
    if fair:
        limit = max(share_of(settings), settings.callbacks_per_host)
        fields |= {"order": Order.FAIR, "tenant_max_inflight": limit}
    return QueueSettings.model_validate(fields)


def _classify(reply: PostReply, seconds: float) -> tuple[Outcome, float]:
    if reply.status in _SUCCESS:
        receipt = CallbackReceipt(
            http_status=reply.status, length=reply.length, seconds=round(seconds, 3)
        )
        return Success(msgspec.json.encode(receipt)), 0.0
    error = f"HTTP {reply.status} with {in_bytes(reply.length)}"
    if reply.status == _GONE:
        return Rejected("gone", error), 0.0
    default = _THROTTLE_SECONDS if reply.status in _THROTTLED else 0.0
    after = default if reply.retry_after is None else reply.retry_after
    return Failed(error), min(after, _MAX_RETRY_AFTER)


async def _log_outage(available: bool, code: str) -> None:  # noqa: FBT001 - `OutageRetry` passes this argument by position
    if available:
        _log.info("store available again; sending callbacks")
    else:
        _log.warning("store unavailable; callbacks wait", extra={"code": code})

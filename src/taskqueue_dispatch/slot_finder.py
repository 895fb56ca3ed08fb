"""`find_endpoint` for code in this process: it returns a slot, a position in the wait queue, or a refusal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
import weakref
from collections.abc import Generator
from functools import partial
from typing import Any, Self

import msgspec

from taskqueue_core.capabilities import SlotLease, SlotPool
from taskqueue_core.errors import BackendUnavailable, InvalidInput, LeaseLost, TaskQueueError
from taskqueue_core.limits import check_duration, check_label, check_name
from taskqueue_core.retry import RetryPolicy
from taskqueue_dispatch.config import DispatchSettings
from taskqueue_dispatch.lease_renewal import LeaseRenewer, RenewedLease
from taskqueue_dispatch.models import ModelConfig, WhenDown
from taskqueue_dispatch.registry import ModelRegistry
from taskqueue_dispatch.submit import NO_ENDPOINTS, NO_HEALTHY_ENDPOINT, NoSlots, Reason
from taskqueue_dispatch.wait_queue import SlotWaiters, Waiter

_IDLE = 0.05
"""seconds after which the idle slot of another dispatcher, kept for its next job, may be taken over"""
_RELEASE_SECONDS = 1.0
"""longest wait for releases, in seconds: `aclose` cancels those that take longer, `release` lets them continue"""
_BACKOFF = RetryPolicy(base=0.05, cap=1.0)
_PREFIX = "find:"
"""prefix of request ids in leases, so that a request never takes over the lease of a job"""
_log = logging.getLogger("taskqueue.dispatch")


class SlotPermit:
    """A slot of an endpoint for one request, as an async context manager that releases the slot on exit.

    The slot is held while this object exists; if the object is garbage-collected, the slot is released. Requests to
    the endpoint must carry `headers`: a server that reports its running jobs must report this request, or the slot is
    revoked.
    """

    def __init__(self, held: RenewedLease, finder: SlotFinder) -> None:
        self._held = held
        self._finder = finder
        self._forgotten = weakref.finalize(
            self, _in_loop, asyncio.get_running_loop(), partial(finder.give_back, held)
        )
        self._forgotten.atexit = False

    @property
    def url(self) -> str:
        """Return the URL of the endpoint."""
        return self._held.lease.url

    @property
    def server(self) -> str:
        """Return the name of the server."""
        return self._held.lease.server

    @property
    def model(self) -> str:
        """Return the name of the model."""
        return self._held.lease.model

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers that a request to the endpoint must carry."""
        job = self._held.lease.job or ""
        return {"X-Source": "dispatcher", "X-Job-Id": job, "Idempotency-Key": job}

    @property
    def lost(self) -> asyncio.Event:
        """Return an event that is set when the slot is revoked."""
        return self._held.lost

    async def detach(self, ttl: float) -> SlotLease:
        """Keep the slot for work that continues on the server, for at most ``ttl`` seconds, and return the lease.

        Any process can release the returned lease later with `SlotPool.release`. Raises `LeaseLost` or
        `BackendUnavailable`.
        """
        lease = await self._finder.detach(self._held, ttl)
        self._forgotten.detach()
        return lease

    async def release(self) -> None:
        """Release the slot. Idempotent. Raises no error of the store: a failed release is retried in the background."""
        if self._forgotten.detach() is not None:
            await self._finder.release(self._held)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()


class FoundLeased(msgspec.Struct, frozen=True):
    """The result of `find_endpoint` if a slot was free."""

    permit: SlotPermit


FoundNone = NoSlots
"""The result of `find_endpoint` if the request gets no slot and may not wait for one."""


class FoundQueued:
    """A position in the wait queue. Await it once to get the permit.

    The position is given up if the wait is cancelled or this object is dropped. Awaiting raises `TimeoutError` if no
    slot becomes free in time, `BackendUnavailable` if the dispatcher shuts down or the store is unavailable, and
    `InvalidInput` the second time.
    """

    def __init__(self, slot: _WaitingPosition, position: int) -> None:
        self.position = position
        """number of callers that wait before this caller"""
        self._position = slot
        self._forgotten = weakref.finalize(self, _in_loop, asyncio.get_running_loop(), slot.leave)
        self._forgotten.atexit = False

    def __await__(self) -> Generator[Any, None, SlotPermit]:
        if self._forgotten.detach() is None:
            raise InvalidInput(
                "FoundQueued", "a result that was already awaited", "a new result of find_endpoint"
            )
        return self._position.wait().__await__()


class _WaitingPosition:
    """The state of a `FoundQueued`, kept outside it, so that the wait ends when the `FoundQueued` is dropped."""

    def __init__(self, finder: SlotFinder, waiter: Waiter, job: str, timeout: float) -> None:
        self._finder = finder
        self._waiter = waiter
        self._job = job
        self._timed_out = False
        self._taken = False
        self._timer = asyncio.get_running_loop().call_later(timeout, self._time_out)

    async def wait(self) -> SlotPermit:
        try:
            while True:
                held = None if self._timed_out else await self._waiter.given
                if self._timed_out:
                    raise TimeoutError("no slot became free in time")
                if held is None:
                    raise BackendUnavailable("the dispatcher is shutting down")
                self._taken = True
                permit = await self._finder.bound(held, self._job)
                if permit is not None:
                    return permit
                self._taken = False
                self._finder.waiters.requeue(self._waiter)
        finally:
            self.leave()

    def leave(self) -> None:
        """Leave the wait queue, and release a slot that was given but not used. Idempotent."""
        self._timer.cancel()
        self._finder.waiters.leave(self._waiter)
        given = self._waiter.given
        if self._taken or not given.done() or given.cancelled():
            return
        self._taken = True
        if (held := given.result()) is not None:
            self._finder.give_back(held)

    def _time_out(self) -> None:
        self._timed_out = True
        given = self._waiter.given
        self.leave()
        if not given.done():
            given.set_result(None)


class SlotFinder:
    """The component that finds free slots for code in this process. The `LeaseRenewer` renews the slots it returns."""

    def __init__(
        self,
        pool: SlotPool,
        registry: ModelRegistry,
        renewer: LeaseRenewer,
        waiters: SlotWaiters,
        settings: DispatchSettings,
        *,
        holder: str,
    ) -> None:
        """Create a finder without any I/O. ``holder`` is the name of this dispatcher."""
        self.waiters = waiters
        self._pool = pool
        self._registry = registry
        self._renewer = renewer
        self._settings = settings
        self._holder = holder
        self._releases: set[asyncio.Task[None]] = set()

    async def find_endpoint(
        self,
        model: str,
        *,
        request_id: str | None = None,
        tenant: str | None = None,
        timeout: float | None = None,
    ) -> FoundLeased | FoundQueued | FoundNone:
        """Return a slot of a model, a position in the wait queue, or the reason why there is neither.

        If ``request_id`` already has a slot of the model, the caller gets the same slot again as soon as any slot is
        free; the earlier permit is then lost. A position in the wait queue expires after ``timeout`` seconds (default:
        the setting ``find_timeout``). Raises `InvalidInput` or `BackendUnavailable`.
        """
        check_label("model", model)
        if tenant is not None:
            check_name("tenant", tenant)
        if timeout is not None:
            check_duration("timeout", timeout)
        job = _PREFIX + (secrets.token_hex(16) if request_id is None else request_id)
        check_name("request_id", job)
        view = self._registry.view(model)
        if view is None:
            await self._registry.refresh()
            view = self._registry.view(model)
        if view is None or not view.slots:
            return NO_ENDPOINTS
        if not self.waiters.wanting(model) and (permit := await self._acquire(model, job)):
            return FoundLeased(permit)
        if await self._is_down(model, view.config):
            return NO_HEALTHY_ENDPOINT
        before = self.waiters.wanting(model)
        waiter = self.waiters.enter(model, tenant)
        if isinstance(waiter, Reason):
            return FoundNone(waiter, "no further caller may wait for a slot of the model", 1.0)
        seconds = self._settings.find_timeout if timeout is None else timeout
        return FoundQueued(_WaitingPosition(self, waiter, job, seconds), before)

    async def aclose(self) -> None:
        """Refuse all waiting callers, and wait up to a second for pending releases. Permits in use stay valid."""
        self.waiters.close()
        if self._releases:
            await asyncio.wait(self._releases, timeout=_RELEASE_SECONDS)
        for task in self._releases:
            task.cancel()
        await asyncio.gather(*self._releases, return_exceptions=True)

    async def bound(self, held: RenewedLease, job: str) -> SlotPermit | None:
        """Assign a slot to a request. Return ``None`` if the slot has been lost."""
        try:
            (lease,) = await self._pool.assign((held.lease, job), ttl=self._settings.lease)
        except BaseException:
            self.give_back(held)
            raise
        if lease is None:
            self._renewer.drop(held)
            return None
        self._renewer.change(held, lease)
        return SlotPermit(held, self)

    async def detach(self, held: RenewedLease, ttl: float) -> SlotLease:
        """Detach a slot from this process for at most ``ttl`` seconds: see `SlotPermit.detach`."""
        (lease,) = await self._pool.detach(held.lease, ttl=ttl)
        if lease is None:
            raise LeaseLost("the lease of the slot has expired or ended")
        self._renewer.drop(held)
        return lease

    async def release(self, held: RenewedLease) -> None:
        """Release a slot, and wait up to a second for the store."""
        await asyncio.wait([self.give_back(held)], timeout=_RELEASE_SECONDS)

    def give_back(self, held: RenewedLease) -> asyncio.Task[None]:
        """Start releasing a slot. Failed calls are retried until the slot's lease may have expired."""
        self._renewer.drop(held)
        task = asyncio.get_running_loop().create_task(self._give_back(held.lease))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)
        return task

    async def _give_back(self, lease: SlotLease) -> None:
        end = time.monotonic() + self._settings.lease
        attempt = 0
        while time.monotonic() < end:
            attempt += 1
            try:
                await self._pool.release(lease)
            except TaskQueueError:
                await asyncio.sleep(_BACKOFF.delay(attempt))
            else:
                return
        _log.warning(
            "could not release a slot; it is free again when its lease expires",
            extra={"server": lease.server},
        )

    async def _acquire(self, model: str, job: str) -> SlotPermit | None:
        leases = await self._pool.acquire(model, self._holder, ttl=self._settings.lease, idle=_IDLE)
        return await self.bound(self._renewer.hold(leases[0]), job) if leases else None

    async def _is_down(self, model: str, config: ModelConfig) -> bool:
        if config.when_down is WhenDown.QUEUE:
            return False
        return not any(info.usable for info in (await self._pool.inspect(model)).endpoints)


def _in_loop(loop: asyncio.AbstractEventLoop, call: Any) -> None:
    """Schedule a call in the event loop, from the thread in which an object was garbage-collected."""
    # If the loop is closed, the lease is no longer renewed, and expires.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call)

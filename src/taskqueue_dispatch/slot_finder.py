"""Find an endpoint in process: a slot at once, a place in line, or the reason why there is neither."""

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
from taskqueue_dispatch.registry import ModelRegistry, ModelView
from taskqueue_dispatch.submit import Reason
from taskqueue_dispatch.wait_queue import SlotWaiters, Waiter

_IDLE = 0.05
"""seconds for which other dispatchers may have a slot in hand for a job that may come"""
_LATER = 10.0
_PATIENCE = 1.0
"""seconds that a release waits for the store; it goes on without who asked for it"""
_PAUSE = RetryPolicy(base=0.05, cap=1.0)
_MARK = "find:"
"""what requests begin with among the jobs of leases, so that none takes over a job's"""
_log = logging.getLogger("taskqueue.dispatch")


class SlotPermit:
    """A slot of an endpoint, for one request. An async context manager that releases it at its end.

    It is kept while this object lives: one that is forgotten is released. Requests to the endpoint must have `headers`:
    a server that tells which jobs it runs is to know this one, else the slot is taken back after a while.
    """

    def __init__(self, held: RenewedLease, finder: SlotFinder) -> None:
        """Made by `SlotFinder.find_endpoint`."""
        self._held = held
        self._finder = finder
        self._forgotten = weakref.finalize(
            self, _in_loop, asyncio.get_running_loop(), partial(finder.give_back, held)
        )
        self._forgotten.atexit = False

    @property
    def url(self) -> str:
        """The endpoint's."""
        return self._held.lease.url

    @property
    def server(self) -> str:
        """Name of the server."""
        return self._held.lease.server

    @property
    def model(self) -> str:
        """The model's name."""
        return self._held.lease.model

    @property
    def headers(self) -> dict[str, str]:
        """What a request to the endpoint is to have."""
        job = self._held.lease.job or ""
        return {"X-Source": "dispatcher", "X-Job-Id": job, "Idempotency-Key": job}

    @property
    def lost(self) -> asyncio.Event:
        """Set where the slot was revoked."""
        return self._held.lost

    async def detach(self, ttl: float) -> SlotLease:
        """Leave the slot to what runs on the server, for ``ttl`` seconds at most, and return the lease.

        Who has that can release it later, in any process: `SlotPool.release`. Raises `LeaseLost`, `BackendUnavailable`.
        """
        lease = await self._finder.detach(self._held, ttl)
        self._forgotten.detach()
        return lease

    async def release(self) -> None:
        """Give the slot back. Idempotent. Never raises: a store that is out of reach is tried again behind it."""
        if self._forgotten.detach() is not None:
            await self._finder.release(self._held)

    async def __aenter__(self) -> Self:
        """Return the permit itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Release."""
        await self.release()


class FoundLeased(msgspec.Struct, frozen=True):
    """A slot was free."""

    permit: SlotPermit


class FoundNone(msgspec.Struct, frozen=True):
    """There is none, and no room to wait for one."""

    reason: Reason
    detail: str
    retry_after: float
    """seconds after which it is worth another try"""


class FoundQueued:
    """A place in line. Await it, once, for the permit; who is cancelled or forgets it leaves the line.

    Raises `TimeoutError` where no slot came in time, and `BackendUnavailable` where the dispatcher is shutting down.
    """

    def __init__(self, slot: _WaitingPosition, position: int) -> None:
        """Made by `SlotFinder.find_endpoint`."""
        self.position = position
        """how many were in line before it"""
        self._place = slot
        self._forgotten = weakref.finalize(self, _in_loop, asyncio.get_running_loop(), slot.leave)
        self._forgotten.atexit = False

    def __await__(self) -> Generator[Any, None, SlotPermit]:
        """Wait for the permit."""
        if self._forgotten.detach() is None:
            raise InvalidInput("place in line", "one that was awaited before", "a new one")
        return self._place.wait().__await__()


class _WaitingPosition:
    """What a place in line needs beyond the object that its owner has: it must not keep that alive."""

    def __init__(self, finder: SlotFinder, waiter: Waiter, job: str, timeout: float) -> None:
        self._finder = finder
        self._waiter = waiter
        self._job = job
        self._late = False
        self._taken = False
        self._timer = asyncio.get_running_loop().call_later(timeout, self._time_out)

    async def wait(self) -> SlotPermit:
        try:
            while True:
                held = None if self._late else await self._waiter.given
                if held is None:
                    raise self._refusal()
                self._taken = True
                permit = await self._finder.bound(held, self._job)
                if permit is not None:
                    return permit
                self._taken = False
                self._finder.waiters.requeue(self._waiter)
        finally:
            self.leave()

    def leave(self) -> None:
        """Leave the line; a slot that was handed over and not taken goes back. Idempotent."""
        self._timer.cancel()
        self._finder.waiters.leave(self._waiter)
        given = self._waiter.given
        if self._taken or not given.done() or given.cancelled():
            return
        self._taken = True
        if (held := given.result()) is not None:
            self._finder.give_back(held)

    def _time_out(self) -> None:
        self._late = True
        given = self._waiter.given
        self.leave()
        if not given.done():
            given.set_result(None)

    def _refusal(self) -> Exception:
        if self._late:
            return TimeoutError("no slot became free in time")
        return BackendUnavailable("the dispatcher is shutting down")


class SlotFinder:
    """Finds endpoints for this process. What it hands out, the keeper renews."""

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
        """Do no input or output. ``holder`` is who this dispatcher is."""
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
        """Return a slot of a model, a place in line for one, or the reason why there is neither.

        A ``request_id`` that has a slot of the model gets that one, and who had it before finds it lost. ``timeout``
        are the seconds that a place in line is good for. Raises `InvalidInput`, `BackendUnavailable`.
        """
        check_label("model", model)
        if tenant is not None:
            check_name("tenant", tenant)
        if timeout is not None:
            check_duration("timeout", timeout)
        job = _MARK + (secrets.token_hex(16) if request_id is None else request_id)
        check_name("request_id", job)
        view = await self._view(model)
        if view is None or not view.slots:
            return FoundNone(Reason.NO_ENDPOINTS, "the model has no endpoint with slots", _LATER)
        if not self.waiters.wanting(model) and (permit := await self._at_once(model, job)):
            return FoundLeased(permit)
        if await self._is_down(model, view.config):
            return FoundNone(
                Reason.NO_HEALTHY_ENDPOINT, "no endpoint of the model is healthy", _LATER
            )
        before = self.waiters.wanting(model)
        waiter = self.waiters.enter(model, tenant)
        if isinstance(waiter, Reason):
            return FoundNone(waiter, "too many jobs wait already", 1.0)
        seconds = self._settings.find_timeout if timeout is None else timeout
        return FoundQueued(_WaitingPosition(self, waiter, job, seconds), before)

    async def aclose(self) -> None:
        """Turn away who waits, and see to it that what is being released is. Permits that are in use stay so."""
        self.waiters.close()
        if self._releases:
            await asyncio.wait(self._releases, timeout=_PATIENCE)
        for task in self._releases:
            task.cancel()
        await asyncio.gather(*self._releases, return_exceptions=True)

    # For permits and places.

    async def bound(self, held: RenewedLease, job: str) -> SlotPermit | None:
        """Bind a slot to a request; ``None`` if it is not there any more."""
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
        """See `SlotPermit.detach`."""
        (lease,) = await self._pool.detach(held.lease, ttl=ttl)
        if lease is None:
            raise LeaseLost("the slot was revoked")
        self._renewer.drop(held)
        return lease

    async def release(self, held: RenewedLease) -> None:
        """Give a slot back, and wait a moment for the store."""
        await asyncio.wait([self.give_back(held)], timeout=_PATIENCE)

    def give_back(self, held: RenewedLease) -> asyncio.Task[None]:
        """Begin to give a slot back. It is tried until it may have run out."""
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
                await asyncio.sleep(_PAUSE.delay(attempt))
            else:
                return
        _log.warning(
            "could not release a slot; it is free again when its lease expires",
            extra={"server": lease.server},
        )

    async def _view(self, model: str) -> ModelView | None:
        view = self._registry.view(model)
        if view is None:
            await self._registry.refresh()
            view = self._registry.view(model)
        return view

    async def _at_once(self, model: str, job: str) -> SlotPermit | None:
        leases = await self._pool.acquire(model, self._holder, ttl=self._settings.lease, idle=_IDLE)
        return await self.bound(self._renewer.hold(leases[0]), job) if leases else None

    async def _is_down(self, model: str, config: ModelConfig) -> bool:
        if config.when_down is WhenDown.QUEUE:
            return False
        return not any(info.usable for info in (await self._pool.inspect(model)).endpoints)


def _in_loop(loop: asyncio.AbstractEventLoop, call: Any) -> None:
    """Call in the event loop, from wherever an object is forgotten."""
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody renews any more
        loop.call_soon_threadsafe(call)

"""The requests in progress, by host, so that hosts that hang take only a small share of the places. Does no I/O.

A request *hangs* if it has no answer after two seconds. A host hangs if its last request ended without an answer after
that time, or if one in progress hangs and the host has not answered before. Such a host gets one request at a time, and
all of them together get a quarter of the places; other callbacks to them are postponed. If all places are in use,
requests that hang are cut off until they take a quarter of the places: first those to hosts that have not answered
before, the oldest first.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable

from taskqueue_core.retry import RetryPolicy
from taskqueue_dispatch.config import DispatchSettings
from taskqueue_dispatch.outbound_http.dns import NotReached

PATIENCE_SECONDS = 2.0
"""seconds without an answer after which a request hangs"""
_SHARE = 4
_MAX_REMEMBERED = 10_000
"""maximum number of hosts, and of postponed callbacks, that are remembered"""
_POSTPONED = RetryPolicy(base=2.0, cap=300.0, jitter=0.5)


def share_of(settings: DispatchSettings) -> int:
    """Return a quarter of all places: the limit for hosts that hang, for callbacks that wait, and for each tenant."""
    return max(1, settings.callbacks_at_once // _SHARE)


class _Request:
    """One request in progress."""

    def __init__(self, host: str, since: float, limit: asyncio.Timeout) -> None:
        self.host = host
        self.since = since
        self.limit = limit
        self.is_cut = False


class Receivers:
    """The hosts that receive callbacks, and the requests that this process sends to them."""

    def __init__(
        self, settings: DispatchSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_host = settings.callbacks_per_host
        self._share = share_of(settings)
        self._clock = clock
        self._requests: dict[str, list[_Request]] = {}
        """requests in progress by host, the oldest first"""
        self._waiting = 0
        self._ended = asyncio.Condition()
        self._answered: OrderedDict[str, bool] = OrderedDict()
        """for each host, whether it answered its last request (otherwise, the request hung); the latest host is last"""
        self._postponed: OrderedDict[str, int] = OrderedDict()
        """how often each waiting callback was postponed, by task id"""

    async def turn(self, host: str) -> bool:
        """Wait until a request may be sent to a host. Return False if the callback is to be postponed instead."""
        while not self._hangs(host):
            if len(self._requests.get(host, ())) < self._per_host:
                return True
            if self._waiting >= self._share:
                return False
            self._waiting += 1
            try:
                async with self._ended:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._ended.wait(), PATIENCE_SECONDS / 2)
            finally:
                self._waiting -= 1
        hanging = (requests for name, requests in self._requests.items() if self._hangs(name))
        places = sum(map(len, hanging))
        return host not in self._requests and places < self._share

    @contextlib.asynccontextmanager
    async def request(self, host: str) -> AsyncIterator[None]:
        """Record a request during the block. Raises `NotReached` if the request is cut off."""
        requests = self._requests.setdefault(host, [])
        request = _Request(host, self._clock(), asyncio.timeout(None))
        requests.append(request)
        try:
            async with request.limit:
                yield
            self._remember(host, answered=True)
        except Exception as error:
            if self._is_slow(request):
                self._remember(host, answered=False)
            if isinstance(error, TimeoutError):
                raise NotReached("no answer yet, and too many receivers hang") from None
            raise
        finally:
            requests.remove(request)
            if not requests:
                del self._requests[host]
            async with self._ended:
                self._ended.notify_all()

    def cut(self) -> float:
        """Cut off requests that hang beyond their share. Return the seconds until another call may be needed."""
        requests = (request for each in self._requests.values() for request in each)
        slow = [request for request in requests if self._is_slow(request)]
        slow.sort(key=lambda request: (self._answered.get(request.host, False), request.since))
        for request in slow[: -self._share]:
            if not request.is_cut:
                request.is_cut = True
                request.limit.reschedule(0.0)
        return PATIENCE_SECONDS / 4

    def postponed(self, task_id: str) -> float:
        """Count that a callback is postponed. Return the seconds until it is due again."""
        number = self._postponed.pop(task_id, 0) + 1
        self._postponed[task_id] = number
        if len(self._postponed) > _MAX_REMEMBERED:
            self._postponed.popitem(last=False)
        return _POSTPONED.delay(number)

    def times_postponed(self, task_id: str) -> int:
        """Return how often a callback was postponed by this process."""
        return self._postponed.get(task_id, 0)

    def forget(self, task_id: str) -> None:
        """Forget a callback that has ended."""
        self._postponed.pop(task_id, None)

    def _hangs(self, host: str) -> bool:
        answered = self._answered.get(host)
        if answered is None:
            return any(map(self._is_slow, self._requests.get(host, ())))
        return not answered

    def _is_slow(self, request: _Request) -> bool:
        return self._clock() - request.since >= PATIENCE_SECONDS

    def _remember(self, host: str, *, answered: bool) -> None:
        self._answered[host] = answered
        self._answered.move_to_end(host)
        if len(self._answered) > _MAX_REMEMBERED:
            self._answered.popitem(last=False)

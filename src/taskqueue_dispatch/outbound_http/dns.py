"""Name resolution by the system's resolver, with a limited number of threads."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from taskqueue_core.errors import TaskQueueError

Resolve = Callable[[str, int], Awaitable[tuple[str, ...]]]
"""Function that returns the addresses of a host. Raises `NotReached`, or `NameUnknown` if the host does not exist."""
_THREADS = 8
_RECENT = 10.0
_MANY = 1000
"""maximum number of names in the cache"""
_UNKNOWN = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}


class NotReached(TaskQueueError):
    """The error if a host name was not resolved, or no complete response arrived. A later attempt may succeed."""

    code = "not_reached"


class NameUnknown(NotReached):
    """The error if the host name does not exist."""

    code = "name_unknown"


async def look_up(host: str, port: int, *, threads: str = "look-up") -> tuple[str, ...]:
    """Return the addresses of a host name. Raises `NotReached`, or `NameUnknown` if the host does not exist.

    The name is resolved by the system's resolver, in the thread pool named ``threads``. Lookups in different pools
    never wait for each other.
    """
    loop = asyncio.get_running_loop()
    try:
        matches = await loop.run_in_executor(_threads(threads), _ask, host, port)
    except socket.gaierror as error:
        if error.errno in _UNKNOWN:
            raise NameUnknown("the host name does not exist") from None
        raise NotReached("the host name could not be resolved") from None
    except (OSError, UnicodeError):
        raise NotReached("the host name could not be resolved") from None
    return tuple(dict.fromkeys(matches))


def _ask(host: str, port: int) -> list[str]:
    matches = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return [str(address[0]) for *_, address in matches]


@cache
def _threads(name: str) -> ThreadPoolExecutor:
    # Use separate threads, because a resolver that hangs must not block the default executor.
    return ThreadPoolExecutor(_THREADS, name)


class CachedLookup:
    """A cache for a resolver. Concurrent lookups of a name share one call, whose result is kept for ten seconds.

    Use it only if the addresses are checked again before connecting, or if connections are made only to addresses that
    were checked.
    """

    def __init__(
        self,
        resolve: Resolve,
        clock: Callable[[], float] = time.monotonic,
        *,
        failures: float = _RECENT,
    ) -> None:
        """Create an empty cache. ``clock`` returns seconds. A failed lookup is cached for ``failures`` seconds."""
        self._resolve = resolve
        self._clock = clock
        self._failures = failures
        self._requests: dict[tuple[str, int], tuple[float, asyncio.Task[tuple[str, ...]]]] = {}

    async def __call__(self, host: str, port: int) -> tuple[str, ...]:
        """Return the result of a lookup that is at most ten seconds old, or raise its error."""
        now = self._clock()
        until, requested = self._requests.get((host, port), (0.0, None))
        if requested is None or until <= now:
            self._forget(now)
            requested = asyncio.create_task(self._ask(host, port))
            # Read the exception. Otherwise asyncio logs it if all callers have been cancelled.
            requested.add_done_callback(_read_exception)
            self._requests[host, port] = now + _RECENT, requested
        return await asyncio.shield(requested)

    async def aclose(self) -> None:
        """Cancel running lookups, and empty the cache. Idempotent."""
        requested = [task for _, task in self._requests.values()]
        self._requests.clear()
        for task in requested:
            task.cancel()
        await asyncio.gather(*requested, return_exceptions=True)

    async def _ask(self, host: str, port: int) -> tuple[str, ...]:
        try:
            async with asyncio.timeout(_RECENT):
                return await self._resolve(host, port)
        except Exception:
            requested = self._requests.get((host, port))
            if requested is not None and requested[1] is asyncio.current_task():
                until = min(requested[0], self._clock() + self._failures)
                self._requests[host, port] = until, requested[1]
            raise

    def _forget(self, now: float) -> None:
        if len(self._requests) < _MANY:
            return
        self._requests = {
            position: waiter
            for position, waiter in self._requests.items()
            if waiter[0] > now or not waiter[1].done()
        }
        if len(self._requests) >= _MANY:
            raise NotReached("too many different host names were looked up within a few seconds")


def _read_exception(requested: asyncio.Task[tuple[str, ...]]) -> None:
    if not requested.cancelled():
        requested.exception()

"""Quotas by token name, for one process: the rate of requests and published tasks, and the number of open sockets."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import ExitStack

from taskqueue_core.hooks import Identity
from taskqueue_server.auth.access import OPEN
from taskqueue_server.problems import ProblemError, retry_after

MAX_NAMES = 10_000
"""maximum number of token names whose rate is tracked; the least recently used name is dropped first"""
DEFAULT_SOCKETS = 2500
"""maximum number of open sockets of a token name without a limit of its own"""
MAX_DEBT = 100_000
"""debt, in tasks, beyond which a token name may not publish; it is as large as the largest batch request"""


class Quotas:
    """Counters that enforce the limits of each token name."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._remaining: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._sockets: Counter[str] = Counter()

    def spend(self, identity: Identity, tasks: int = 0) -> None:
        """Count one request, or ``tasks`` published tasks, against the rate of the identity's token name.

        Each name has a bucket, which fills at its rate. A request takes 1 out of the bucket, and is refused if less
        than 1 is left. Tasks may leave the bucket in debt, and are refused only if the debt already exceeds `MAX_DEBT`.
        A refusal raises `ProblemError`.
        """
        if identity.rate is None:
            return
        name, rate, now = identity.name, identity.rate, self._clock()
        most = max(1.0, rate if identity.burst is None else identity.burst)
        remaining, at = self._remaining.get(name, (most, now))
        remaining = min(most, remaining + (now - at) * rate)
        lacking = (-MAX_DEBT if tasks else 1.0) - remaining
        if lacking > 0:
            detail = f"more than {rate:g} requests and tasks per second with tokens of this name"
            again = {"retry-after": retry_after(lacking / rate)}
            raise ProblemError(429, "rate_limited", detail, headers=again)
        self._remaining[name] = (remaining - (tasks or 1), now)
        self._remaining.move_to_end(name)
        if len(self._remaining) > MAX_NAMES:
            self._remaining.popitem(last=False)

    def enter(self, identity: Identity) -> ExitStack | None:
        """Return a slot for one more socket, or ``None`` if the token name has reached its limit on open sockets.

        Closing the slot frees it; closing it again has no effect.
        """
        slot = ExitStack()
        if identity is not OPEN:
            most = DEFAULT_SOCKETS if identity.connections is None else identity.connections
            if self._sockets[identity.name] >= most:
                return None
            self._sockets[identity.name] += 1
            slot.callback(self._leave, identity.name)
        return slot

    def _leave(self, name: str) -> None:
        self._sockets[name] -= 1
        if not self._sockets[name]:
            del self._sockets[name]

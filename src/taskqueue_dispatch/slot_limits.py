"""Limits that this process learns from refusals: how many jobs an endpoint takes at once, if fewer than its slots."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import msgspec

from taskqueue_dispatch.config import DispatchSettings
from taskqueue_dispatch.lease_renewal import RenewedLease

_LONGEST = 10
"""longest pause before an endpoint is tried with one job more, in units of ``busy_rest``"""
_Name = tuple[str, str]


class _Limit(msgspec.Struct):
    running: int = 0
    most: float = math.inf
    pause: float = 0.0
    due: float = 0.0
    """time at which the limit grows"""
    tried: bool = True
    """whether the limit has grown since the last refusal"""


class SlotLimits:
    """The limits of all endpoints in this process. Does no I/O.

    A refusal (503, 429) reduces the limit of an endpoint to the number of jobs that this process runs there besides.
    After a pause of ``busy_rest`` seconds, or ``Retry-After`` if that is longer, the limit grows by one, and again
    after each such pause. If growth leads to a refusal, the next pause is twice as long, up to 10 times ``busy_rest``.
    """

    def __init__(
        self, settings: DispatchSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pause = settings.busy_rest
        self._clock = clock
        self._limits: defaultdict[_Name, _Limit] = defaultdict(_Limit)

    def started(self, model: str, server: str) -> None:
        """Count a job that has a slot of an endpoint."""
        self._limits[model, server].running += 1

    def ended(self, model: str, server: str) -> None:
        """Count the end of a job. Forget an endpoint without jobs and without a limit."""
        limit = self._limits[model, server]
        limit.running -= 1
        if not limit.running and limit.most == math.inf:
            del self._limits[model, server]

    def refused(self, model: str, server: str, retry_after: float | None) -> bool:
        """Reduce the limit, because the endpoint has refused a job that still counts as running.

        Return whether no other jobs of this process are running there.
        """
        limit = self._limits[model, server]
        if limit.tried:
            limit.pause = min(max(self._pause, 2 * limit.pause), _LONGEST * self._pause)
            limit.tried = False
        others = max(0, limit.running - 1)
        limit.most = min(limit.most, others)
        limit.due = self._clock() + max(limit.pause, retry_after or 0.0)
        return not others

    def divide(
        self, free: Sequence[RenewedLease], more: Sequence[RenewedLease]
    ) -> tuple[list[RenewedLease], list[RenewedLease]]:
        """Return the slots in ``free`` with those in ``more`` that the limits allow, and the rest of ``more``."""
        usable, surplus = list(free), list[RenewedLease]()
        for held in more:
            name = held.lease.model, held.lease.server
            same = sum((each.lease.model, each.lease.server) == name for each in usable)
            (usable if self._allows(name, same + 1) else surplus).append(held)
        return usable, surplus

    def _allows(self, name: _Name, number: int) -> bool:
        limit = self._limits.get(name)
        if limit is None:
            return True
        if limit.running + number > limit.most and self._clock() >= limit.due:
            if limit.tried:
                limit.pause = self._pause
            limit.most += 1
            limit.due, limit.tried = self._clock() + limit.pause, True
        return limit.running + number <= limit.most

"""The circuit breaker: an endpoint that fails again and again gets a rest, and then one job to show that it is well."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from taskqueue_dispatch.config import DispatchSettings

LONGEST = 300.0
"""seconds of a rest at most"""
_FORGOTTEN = 2 * LONGEST
_TRIAL = 60.0
"""seconds after which a trial that nobody reported on counts no longer"""
_KNOWN = 10_000


class _Circuit(msgspec.Struct):
    failures: int = 0
    rests: int = 0
    until: float = 0.0
    trial_until: float = 0.0
    touched: float = 0.0


class Breaker:
    """Counts the failures in a row of each endpoint, in this process. No input or output; bounded.

    After `breaker_failures` of them the endpoint rests for `breaker_rest`. Then one trial at a time is allowed: its
    success closes the circuit, its failure is the next rest, twice as long, up to 5 minutes.
    """

    def __init__(
        self, settings: DispatchSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit = settings.breaker_failures
        self._rest = settings.breaker_rest
        self._clock = clock
        self._circuits: dict[tuple[str, str], _Circuit] = {}

    def allows(self, model: str, server: str) -> bool:
        """Return whether an endpoint may get a job now. After a rest the first to ask gets the trial.

        A trial ends by `passed`, `failed` or `undecided`, or after a minute without any of them.
        """
        circuit = self._circuits.get((model, server))
        if circuit is None or not circuit.rests:
            return True
        now = self._clock()
        if now < max(circuit.until, circuit.trial_until):
            return False
        circuit.trial_until = circuit.touched = now + _TRIAL
        return True

    def failed(self, model: str, server: str) -> float | None:
        """Count a failure, and return for how many seconds the endpoint is to rest from now on, if it is.

        Failures of jobs that were sent before its rest began, and come in while it rests, change nothing.
        """
        now = self._clock()
        circuit = self._circuit(model, server, now)
        if now < circuit.until:
            return None
        circuit.failures += 1
        circuit.trial_until = 0.0
        if not circuit.rests and circuit.failures < self._limit:
            return None
        rest = min(self._rest * 2.0 ** min(circuit.rests, 30), LONGEST)
        circuit.rests += 1
        circuit.until = circuit.touched = now + rest
        return rest

    def passed(self, model: str, server: str) -> None:
        """Count a success: the endpoint is as good as new. While it rests that changes nothing but the next rest."""
        circuit = self._circuits.get((model, server))
        if circuit is None:
            return
        if self._clock() < circuit.until:
            circuit.rests = 1
            return
        del self._circuits[model, server]

    def undecided(self, model: str, server: str) -> None:
        """Let another one have the trial: this one was busy, or came to nothing."""
        circuit = self._circuits.get((model, server))
        if circuit is not None:
            circuit.trial_until = 0.0

    def _circuit(self, model: str, server: str, now: float) -> _Circuit:
        result = self._circuits.get((model, server))
        if result is None or result.touched + _FORGOTTEN < now:
            if len(self._circuits) >= _KNOWN:
                self._forget(now)
            result = self._circuits[model, server] = _Circuit()
        result.touched = max(result.touched, now)
        return result

    def _forget(self, now: float) -> None:
        # Those of endpoints that are gone; where all are recent the oldest goes, which costs it its count.
        old = [key for key, circuit in self._circuits.items() if circuit.touched + _FORGOTTEN < now]
        for key in old or [min(self._circuits, key=lambda key: self._circuits[key].touched)]:
            del self._circuits[key]

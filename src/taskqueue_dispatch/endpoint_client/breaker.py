"""The circuit breaker: an endpoint that fails repeatedly is paused, and then gets one job as a trial."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from taskqueue_dispatch.config import DispatchSettings

LONGEST = 300.0
"""longest pause of an endpoint in seconds"""
_EXPIRY_SECONDS = 2 * LONGEST
_TRIAL = 60.0
"""seconds after which a trial without an outcome no longer counts"""
_MAX_CIRCUITS = 10_000


class _Circuit(msgspec.Struct):
    failures: int = 0
    pauses: int = 0
    until: float = 0.0
    trial_until: float = 0.0
    touched: float = 0.0


class Breaker:
    """The circuit breakers of all endpoints in this process. Their number is limited. Does no I/O.

    After ``breaker_failures`` consecutive failures, an endpoint is paused for ``breaker_rest`` seconds. Then one trial
    job at a time is allowed. If it succeeds, the endpoint is used as before; if it fails, the next pause starts and is
    twice as long, up to 5 minutes.
    """

    def __init__(
        self, settings: DispatchSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit = settings.breaker_failures
        self._pause = settings.breaker_rest
        self._clock = clock
        self._circuits: dict[tuple[str, str], _Circuit] = {}

    def allows(self, model: str, server: str) -> bool:
        """Return whether an endpoint may get a job now. After a pause, the first call returns True and begins a trial.

        A trial ends with a call of `passed`, `failed` or `undecided`, or after a minute without such a call.
        """
        circuit = self._circuits.get((model, server))
        if circuit is None or not circuit.pauses:
            return True
        now = self._clock()
        if now < max(circuit.until, circuit.trial_until):
            return False
        circuit.trial_until = circuit.touched = now + _TRIAL
        return True

    def failed(self, model: str, server: str) -> float | None:
        """Count a failure. Return the length in seconds of a pause that starts now, or ``None`` if no pause starts.

        A failure reported during a pause is ignored, because its job was sent before the pause.
        """
        now = self._clock()
        circuit = self._circuit(model, server, now)
        if now < circuit.until:
            return None
        circuit.failures += 1
        circuit.trial_until = 0.0
        if not circuit.pauses and circuit.failures < self._limit:
            return None
        pause = min(self._pause * 2.0 ** min(circuit.pauses, 30), LONGEST)
        circuit.pauses += 1
        circuit.until = circuit.touched = now + pause
        return pause

    def passed(self, model: str, server: str) -> None:
        """Record a success and reset the endpoint. During a pause, only the length of the next pause is reset."""
        circuit = self._circuits.get((model, server))
        if circuit is None:
            return
        if self._clock() < circuit.until:
            circuit.pauses = 1
            return
        del self._circuits[model, server]

    def undecided(self, model: str, server: str) -> None:
        """End a trial without an outcome, because the server was busy or the slot was lost, and allow another trial."""
        circuit = self._circuits.get((model, server))
        if circuit is not None:
            circuit.trial_until = 0.0

    def _circuit(self, model: str, server: str, now: float) -> _Circuit:
        result = self._circuits.get((model, server))
        if result is None or result.touched + _EXPIRY_SECONDS < now:
            if len(self._circuits) >= _MAX_CIRCUITS:
                self._forget(now)
            result = self._circuits[model, server] = _Circuit()
        result.touched = max(result.touched, now)
        return result

    def _forget(self, now: float) -> None:
        # Forget expired circuits. If there are none, forget the one that has been unused for the longest time.
        old = [
            key
            for key, circuit in self._circuits.items()
            if circuit.touched + _EXPIRY_SECONDS < now
        ]
        for key in old or [min(self._circuits, key=lambda key: self._circuits[key].touched)]:
            del self._circuits[key]

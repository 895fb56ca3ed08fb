"""The rule by which a worker whose attempts all fail stops receiving tasks.

::

    working ─ `limit` failures in a row ─> resting ─ cool-down over ─> probing ─ `probes` failed probes ─> ended
       ^                                      ^                          │ │
       │                                      └── failed, longer rest ───┘ │
       └──────────────────── one success, unless ended ────────────────────┘
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum
from typing import ClassVar

from taskqueue_core.errors import TaskQueueError


class WorkerQuarantined(TaskQueueError):
    """The worker stopped because all its latest attempts failed, so the cause is probably the worker itself.

    >>> WorkerQuarantined.exit_code  # of the command `taskqueue worker`
    3
    """

    code = "worker_quarantined"
    exit_code: ClassVar[int] = 3


class QuarantinePhase(StrEnum):
    """What the worker should do now, depending on the latest failures."""

    WORKING = "working"
    RESTING = "resting"
    """receive no tasks until the cool-down is over"""
    PROBING = "probing"
    """receive one task at a time"""
    ENDED = "ended"
    """stop the worker"""


class Quarantine:
    """A counter of consecutive failures, which decides when the worker pauses, probes or stops.

    It reads the clock but never waits: the caller waits for the end of the cool-down and applies the phase.

    >>> quarantine = Quarantine(limit=2)
    >>> quarantine.failed(), quarantine.failed()
    (False, True)
    >>> print(quarantine.phase)
    resting
    """

    def __init__(
        self,
        limit: int = 20,
        *,
        cooldown: float = 1.0,
        longest: float = 60.0,
        probes: int = 5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a counter without failures.

        After ``limit`` failures in a row, the worker pauses for ``cooldown`` seconds, then tries one task: a probe.
        Each failed probe doubles the pause, up to ``longest`` seconds. After ``probes`` failed probes, the worker ends.
        """
        self._limit = limit
        self._cooldown = cooldown
        self._longest = longest
        self._probes = probes
        self._clock = clock
        self.failures = 0
        """number of consecutive failures"""
        self._probes_failed = 0
        self._until = 0.0
        self.phase = QuarantinePhase.WORKING

    @property
    def rest(self) -> float:
        """Remaining seconds of the cool-down; 0 in all phases except `RESTING`."""
        resting = self.phase is QuarantinePhase.RESTING
        return max(0.0, self._until - self._clock()) if resting else 0.0

    def succeeded(self) -> bool:
        """Count a successful attempt. Return whether the phase changed."""
        if not self.failures:
            return False
        self.failures = 0
        self._probes_failed = 0
        return self.phase is not QuarantinePhase.ENDED and self._move(QuarantinePhase.WORKING)

    def failed(self) -> bool:
        """Count a failed attempt. Return whether the phase changed.

        A failure during a cool-down is not a failed probe, because the task was started before the cool-down.
        """
        self.failures += 1
        if self.phase is QuarantinePhase.PROBING:
            self._probes_failed += 1
            ended = self._probes_failed >= self._probes
            return self._move(QuarantinePhase.ENDED if ended else QuarantinePhase.RESTING)
        if self.phase is QuarantinePhase.WORKING and self.failures >= self._limit:
            return self._move(QuarantinePhase.RESTING)
        return False

    def tick(self) -> bool:
        """End the cool-down if its time is over. Return whether the phase changed."""
        if self.phase is QuarantinePhase.RESTING and self._clock() >= self._until:
            return self._move(QuarantinePhase.PROBING)
        return False

    def _move(self, phase: QuarantinePhase) -> bool:
        changed = phase is not self.phase
        self.phase = phase
        if phase is QuarantinePhase.RESTING:
            rest = min(self._longest, self._cooldown * 2.0 ** min(self._probes_failed, 30))
            self._until = self._clock() + rest
        return changed

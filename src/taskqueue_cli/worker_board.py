"""The latest reports of the processes of ``taskqueue worker``."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from taskqueue_core.errors import ConfigurationError
from taskqueue_worker.report import WorkerReport

BEAT_SECONDS = 1.0
"""interval in seconds in which the event loop of each process makes a report"""
ALIVE_SECONDS = 5.0
"""seconds without a report of a process after which the worker is not alive"""


class Board:
    """The latest report of each process of one command, and what ended processes have done. Thread-safe."""

    def __init__(self, processes: int, now: Callable[[], float] = time.monotonic) -> None:
        """Create a board for this number of processes. ``now`` is the time in seconds."""
        self._processes = processes
        self._now = now
        self._lock = threading.Lock()
        self._latest: dict[int, tuple[float, WorkerReport]] = {}
        self._ended: Counter[tuple[str, str]] = Counter()

    def put(self, number: int, report: WorkerReport) -> None:
        """Store the latest report of the process with this number."""
        with self._lock:
            self._latest[number] = (self._now(), report)

    def remove(self, number: int) -> None:
        """Forget a process that has ended, except what it has done."""
        with self._lock:
            if found := self._latest.pop(number, None):
                self._ended.update(_counts(found[1]))

    def alive(self) -> bool:
        """Return whether the event loop of each process has turned within `ALIVE_SECONDS`."""
        with self._lock:
            now = self._now()
            return all(now - at <= ALIVE_SECONDS for at, _ in self._latest.values())

    def ready(self) -> bool:
        """Return whether all processes receive tasks."""
        with self._lock:
            reports = [report for _, report in self._latest.values()]
        return self.alive() and sum(report.ready for report in reports) >= self._processes

    def total(self) -> tuple[list[WorkerReport], Counter[tuple[str, str]]]:
        """Return the latest reports, and the number of ended attempts by key and outcome, of all processes."""
        with self._lock:
            reports = [report for _, report in self._latest.values()]
            ended = self._ended.copy()
        for report in reports:
            ended.update(_counts(report))
        return reports, ended


def _counts(report: WorkerReport) -> Mapping[tuple[str, str], int]:
    return {
        (key, outcome): number
        for key, counts in report.outcomes.items()
        for outcome, number in counts.items()
    }


class HealthFile:
    """A file that is touched as long as the worker is alive, for probes without a network."""

    def __init__(self, path: Path) -> None:
        """Create or touch the file. Raises `ConfigurationError` if that is not possible."""
        self._path = path
        try:
            path.touch()
        except OSError as error:
            raise ConfigurationError(
                f"--health-file: cannot write {path}: {error.strerror}; name a file in a folder that exists"
            ) from None

    def touch(self) -> None:
        """Touch the file. A failure is not an error: the probe notices it."""
        with contextlib.suppress(OSError):
            self._path.touch()

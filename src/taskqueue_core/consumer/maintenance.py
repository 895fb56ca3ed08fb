"""The loop that runs the maintenance of the store. Any number of servers and workers may run it."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from typing import NoReturn

from taskqueue_core.backend import Backend, Capability
from taskqueue_core.capabilities import Control, Maintained, control_of, dependencies_of, has
from taskqueue_core.consumer.carrier import run_carrier
from taskqueue_core.consumer.expander import expand_workflows
from taskqueue_core.consumer.firing import fire_schedules
from taskqueue_core.consumer.outage import Failures

_EVERY = 2.0
_JITTER = 0.25
_PASS_SECONDS = 30.0
_BEHIND = 30.0
"""a warning is logged if the oldest work that is left became due more than this many seconds ago"""
_log = logging.getLogger("taskqueue.housekeeping")


async def run_maintenance(backend: Backend) -> None:
    """Maintain the store of a backend until cancelled, with its schedules, its workflows and its lines."""
    async with asyncio.TaskGroup() as group:
        group.create_task(run_passes(control_of(backend)))
        if has(backend, Capability.SCHEDULES):
            group.create_task(fire_schedules(backend))
        if has(backend, Capability.AFTER):
            group.create_task(run_carrier(dependencies_of(backend)))
            if has(backend, Capability.DEAD_LETTERS):
                group.create_task(expand_workflows(backend))


async def run_passes(control: Control) -> NoReturn:
    """Run passes: about every two seconds, or after the pause in `Maintained.again_in`.

    Log only the first of several failures in a row.
    """
    failures, report, again_in = Failures(_log, "maintenance failed"), _Report(), None
    while True:
        usual = _EVERY * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311 - the random factor only spreads the load
        await asyncio.sleep(usual if again_in is None else again_in)
        again_in = None
        try:
            async with asyncio.timeout(_PASS_SECONDS):
                done = await control.maintain()
        except Exception as error:  # noqa: BLE001 - the loop must continue after any error
            failures.add(error)
        else:
            failures.clear()
            again_in = done.again_in
            report.add(done)


class _Report:
    """Logs what maintenance did and found, but each finding only once while it lasts."""

    def __init__(self) -> None:
        self._expired = self._recovered = 0
        self._late = False
        self._checked = -math.inf
        self._unclaimed = set[str]()
        self._logged = set[str]()

    def add(self, done: Maintained) -> None:
        """Log the results of a pass. While passes leave work, their figures are added up and logged at the end."""
        self._expired += len(done.expired)
        self._recovered += done.recovered
        if done.again_in is None and (self._expired or self._recovered):
            figures = {"expired": self._expired, "recovered": self._recovered}
            _log.info("maintenance finished", extra=figures)
            self._expired = self._recovered = 0
        behind = done.behind or 0.0
        if behind > _BEHIND and not self._late:
            _log.warning("maintenance does not keep up", extra={"seconds": round(behind)})
        self._late = behind > _BEHIND
        now = time.monotonic()
        if now - self._checked >= _EVERY * (1 - _JITTER):
            self._checked = now
            self._report_unclaimed(set(done.unclaimed))

    def _report_unclaimed(self, found: set[str]) -> None:
        # A queue may have no consumer for one pass, while its worker restarts. Warn only after two checks in a row.
        if news := sorted((found & self._unclaimed) - self._logged):
            _log.warning(
                "queues with waiting tasks have no consumer", extra={"queues": " ".join(news)}
            )
        self._unclaimed, self._logged = found, found & (self._logged | self._unclaimed)

"""The loop that fires the schedules of a store. Any number of servers and workers may run it: see `Schedules.fire`."""

from __future__ import annotations

import asyncio
import logging
import random
from functools import lru_cache
from typing import NoReturn

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import (
    Due,
    Fire,
    Fired,
    Outcome,
    Run,
    Schedules,
    Skip,
    StoredSchedule,
    schedules_of,
)
from taskqueue_core.consumer.outage import Failures, log_fields
from taskqueue_core.errors import TaskQueueError
from taskqueue_core.schedules import (
    Schedule,
    Skipped,
    SkipReason,
    Spec,
    plan,
    scheduled_task,
)

_READ = 1000
"""maximum number of schedules per partition that are read at once"""
_AT_ONCE = 100
"""maximum number of schedules, and of tasks per schedule, in one call"""
_SMALL = 2048
"""maximum number of bytes of a specification that stays in the cache of this process"""
_POLL_SECONDS = 5.0
"""seconds after which the schedules are read without a notification, because one may have been lost"""
_SPREAD_SECONDS = 0.02
"""maximum number of seconds by which a process wakes up later, so that one has fired before the others ask"""
_CALL_SECONDS = 30.0
_log = logging.getLogger("taskqueue.schedules")


async def fire_schedules(backend: Backend) -> NoReturn:
    """Fire the schedules of a backend until cancelled. Log only the first of several failures in a row."""
    failures, reported = Failures(_log, "could not fire schedules"), set[str]()
    while True:
        try:
            schedules = schedules_of(backend)
            async with schedules.signal() as signal:
                while True:
                    async with asyncio.timeout(_CALL_SECONDS):
                        pause = await _fire_due(backend, schedules, reported)
                    failures.clear()
                    if pause > 0:
                        await signal.wait(pause)
                    else:
                        await asyncio.sleep(0)
        except Exception as error:  # noqa: BLE001 - the loop must continue after any error
            failures.add(error)
        await asyncio.sleep(failures.pause)


async def _fire_due(backend: Backend, schedules: Schedules, reported: set[str]) -> float:
    """Fire schedules that are due; return the seconds to wait until the next one is, or 0 if there may be more."""
    shared = backend.capabilities.shared
    due = await fire_due(schedules, reported, shared=shared)
    if due.schedules:
        return 0.0
    if due.next_at is None:
        return _POLL_SECONDS
    pause = due.next_at - due.now
    if shared:
        pause += random.uniform(0, _SPREAD_SECONDS)  # noqa: S311 - the random time only spreads the load
    return min(max(pause, 0.001), _POLL_SECONDS)


async def fire_due(schedules: Schedules, reported: set[str], *, shared: bool = False) -> Due:
    """Fire schedules that are due, and return them with the time of the next one. ``reported``: names in the log.

    With ``shared``, the order is random, so that several processes do not all fire the same schedules first.
    """
    due = await schedules.due(_READ)
    pending = list(due.schedules)
    if shared:
        random.shuffle(pending)
    await _fire_all(schedules, pending, due.now, reported)
    return due


async def _fire_all(
    schedules: Schedules, pending: list[StoredSchedule], now: float, reported: set[str]
) -> None:
    """Fire schedules in steps. The next step is planned while the store carries out the one before.

    Stop if other processes have fired most schedules of a step, because they have probably fired others, too.
    """
    running: asyncio.Task[tuple[Fired, ...]] | None = None
    try:
        for start in range(0, len(pending), _AT_ONCE):
            some = pending[start : start + _AT_ONCE]
            fires = [_planned(stored, now, reported) for stored in some]
            if running is not None:
                done = await running
                if 2 * sum(fired.stale for fired in done) > len(done):
                    return
            running = asyncio.create_task(schedules.fire(*fires))
            await asyncio.sleep(0)  # so that it is sent before the next step is planned
        if running is not None:
            await running
    finally:
        if running is not None and not running.done():
            running.cancel()
            await asyncio.wait([running])


@lru_cache(maxsize=4096)
def _decoded(text: bytes) -> Schedule:
    return Spec.decode(text).schedule


def _reason(skipped: Skipped, refused: Outcome | None) -> str:
    if refused is not None and skipped.reason is SkipReason.REFUSED:
        return refused.result
    return skipped.reason.value


def _planned(stored: StoredSchedule, now: float, reported: set[str]) -> Fire:
    """Return what a schedule does now: at most `_AT_ONCE` tasks, the rest in the next step.

    If this process cannot read the schedule, because a newer version has written it or its time zone is not known here,
    the plan changes nothing. The store then returns the schedule again later, and another process may fire it.
    """
    at = stored.next_at or 0.0
    unchanged = Fire(
        key=stored.key, name=stored.name, version=stored.version, planned_for=at, next_at=at
    )
    try:
        small = len(stored.spec) <= _SMALL
        schedule = _decoded(stored.spec) if small else Spec.decode(stored.spec).schedule
        refused = stored.refused
        tried = None if refused is None else refused.instant
        found = plan(schedule, at, max(now, at), tried)  # by the store's clock, it is due
        if found is None:
            return unchanged
        some, rest = found.instants[:_AT_ONCE], found.instants[_AT_ONCE:]
        return Fire(
            key=stored.key,
            name=stored.name,
            version=stored.version,
            planned_for=at,
            runs=tuple([Run(instant, scheduled_task(schedule, instant)) for instant in some]),
            skipped=tuple([Skip(s.first, _reason(s, refused), s.count) for s in found.skipped]),
            next_at=rest[0] if rest else found.next_at,
        )
    except TaskQueueError as error:
        if stored.name not in reported and len(reported) < _AT_ONCE:
            reported.add(stored.name)
            _log.error(
                "a schedule cannot be fired here",
                extra={"schedule": stored.name, **log_fields(error)},
            )
        return unchanged

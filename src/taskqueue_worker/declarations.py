"""What a worker's tasks declare, compared with what is stored at the worker's start."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from taskqueue_core.application.applying import Comparison, apply_declarations
from taskqueue_core.application.declared_schedules import (
    AppliedSchedule,
    DeclaredSchedules,
    apply_schedules,
)
from taskqueue_core.backend import Backend, Capability
from taskqueue_core.capabilities import control_of, has
from taskqueue_core.consumer.outage import OUTAGE_BACKOFF
from taskqueue_core.errors import BackendUnavailable, CapabilityMissing, TaskQueueError
from taskqueue_core.queue import Queue
from taskqueue_worker.handlers import Handlers

_SHOWN = 10
"""maximum number of queues that the message names"""
_log = logging.getLogger("taskqueue.worker")


class Declared:
    """What the tasks of a worker declare: settings of queues, and schedules."""

    def __init__(
        self,
        settings: Mapping[str, Mapping[str, Any]],
        schedules: Sequence[DeclaredSchedules],
        handlers: Handlers,
        target: str,
    ) -> None:
        """Store the declarations. ``target`` is the worker's name for the command that a message recommends."""
        self._settings = settings
        self._schedules = schedules
        self._handlers = handlers
        self._target = target

    async def apply(self, backend: Backend, *, asked: bool) -> None:
        """Write declarations at the worker's start: if it is ``asked`` to, or if the store lives in this process.

        In the second case nothing else could do it, and what the store cannot keep is only logged. Raises the errors of
        `taskqueue_core.Tasks.apply`.
        """
        if not asked and (backend.capabilities.shared or not has(backend, Capability.CONTROL)):
            return
        try:
            applied = await apply_declarations(
                backend, self._settings, self._schedules, prune=False, dry_run=False
            )
        except CapabilityMissing as error:
            if asked:
                raise
            _log.warning("declarations not applied: %s", error)
        else:
            if asked:
                changes: dict[str, list[str]] = {}
                for each in applied.changed:
                    changes.setdefault(each.key, []).append(each.field)
                lines = [f"{key}: {', '.join(fields)}" for key, fields in changes.items()]
                lines += _words(applied.schedules)
                _log.info("declarations applied, changed: %s", _first(lines) or "none")

    async def watch(
        self, open_queue: Callable[[], Queue], reconnected: asyncio.Event, *, asked: bool
    ) -> None:
        """Compare declarations with what is stored now, and again after each loss of the connection.

        The store may be another one then, for example an empty one in the memory of a server that has restarted. If the
        worker is ``asked`` to apply its declarations, they are applied again. Runs until cancelled.
        """
        await self._compare(open_queue, asked=False)
        while True:
            await reconnected.wait()
            reconnected.clear()
            await self._compare(open_queue, asked=asked)

    async def _compare(self, open_queue: Callable[[], Queue], *, asked: bool) -> None:
        """Log what is not stored as it is declared. Repeated until the store is available.

        A declared timeout is used only until the store's settings have one of their own.
        """
        attempt, differing = 0, list[str]()
        while True:
            try:
                backend = open_queue().backend
                if asked:
                    await self.apply(backend, asked=True)
                differing = await self._differing(backend)
                break
            except BackendUnavailable:
                attempt += 1
                await asyncio.sleep(OUTAGE_BACKOFF.delay(attempt))
            except TaskQueueError as error:
                level = logging.WARNING if asked else logging.DEBUG
                _log.log(level, "declarations not compared with what is stored: %s", error)
                return
        if differing:
            _log.warning(
                "settings of queues, or schedules, differ from the declarations of the tasks: %s; this worker works by "
                "what is stored: 'taskqueue apply %s' writes the declarations, with --dry-run it shows the differences",
                _first(differing),
                self._target,
            )

    async def _differing(self, backend: Backend) -> list[str]:
        control, differing = control_of(backend), []
        for key, fields in self._settings.items():
            settings = await control.settings(key)
            if settings.owner_of("timeout") is not None:
                self._handlers.timeouts.pop(key, None)
            elif fields.get("timeout") is not None:
                self._handlers.timeouts[key] = fields["timeout"]
            found = Comparison(key, fields, settings)
            names = [each.field for each in (*found.changed, *found.undeclared)]
            names += [f"{each.field} (set by an operator)" for each in found.kept]
            if names:
                differing.append(f"{key}: {', '.join(names)}")
        schedules = await apply_schedules(
            Queue(backend), self._schedules, prune=False, dry_run=True
        )
        return differing + _words(schedules)


def _words(schedules: Sequence[AppliedSchedule]) -> list[str]:
    return [f"schedule {each.name}: {each.change}" for each in schedules]


def _first(queues: list[str]) -> str:
    more = len(queues) - _SHOWN
    return "; ".join([*queues[:_SHOWN], *([f"and {more} more"] if more > 0 else [])])

"""The policies that a worker's tasks declare, compared with the settings of their queues at the worker's start."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from taskqueue_core.application.applying import Comparison, apply_declarations
from taskqueue_core.backend import Backend, Capability
from taskqueue_core.capabilities import control_of, has
from taskqueue_core.consumer.outage import OUTAGE_BACKOFF
from taskqueue_core.errors import BackendUnavailable, CapabilityMissing, TaskQueueError
from taskqueue_core.queue import Queue
from taskqueue_worker.handlers import Handlers

_SHOWN = 10
"""maximum number of queues that the message names"""
_log = logging.getLogger("taskqueue.worker")


async def apply(
    backend: Backend, declared: Mapping[str, Mapping[str, Any]], *, asked: bool
) -> None:
    """Write declarations at the worker's start: if it is ``asked`` to, or if the store lives in this process.

    In the second case nothing else could do it, and what the store cannot keep is only logged. Raises the errors of
    `taskqueue_core.Tasks.apply`.
    """
    if not asked and (backend.capabilities.shared or not has(backend, Capability.CONTROL)):
        return
    try:
        applied = await apply_declarations(backend, declared, prune=False, dry_run=False)
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
            _log.info("declarations applied, settings changed: %s", _first(lines) or "none")


async def watch(
    open_queue: Callable[[], Queue],
    declared: Mapping[str, Mapping[str, Any]],
    handlers: Handlers,
    reconnected: asyncio.Event,
    target: str,
    *,
    asked: bool,
) -> None:
    """Compare declarations with the settings of the queues now, and again after each loss of the connection.

    The store may be another one then, for example an empty one in the memory of a server that has restarted. If the
    worker is ``asked`` to apply its declarations, they are applied again. ``target`` is its name for the command that
    the message recommends. Runs until cancelled.
    """
    await _compare(open_queue, declared, handlers, target, asked=False)
    while True:
        await reconnected.wait()
        reconnected.clear()
        await _compare(open_queue, declared, handlers, target, asked=asked)


async def _compare(
    open_queue: Callable[[], Queue],
    declared: Mapping[str, Mapping[str, Any]],
    handlers: Handlers,
    target: str,
    *,
    asked: bool,
) -> None:
    """Log which queues have other settings than their tasks declare. Repeated until the store is available.

    A declared timeout is used only until the store's settings have one of their own.
    """
    attempt, differing = 0, list[str]()
    while True:
        try:
            backend = open_queue().backend
            if asked:
                await apply(backend, declared, asked=True)
            differing = await _differing(backend, declared, handlers)
            break
        except BackendUnavailable:
            attempt += 1
            await asyncio.sleep(OUTAGE_BACKOFF.delay(attempt))
        except TaskQueueError as error:
            level = logging.WARNING if asked else logging.DEBUG
            _log.log(level, "declarations not compared with the settings of the queues: %s", error)
            return
    if differing:
        _log.warning(
            "the settings of queues differ from the declarations of their tasks: %s; this worker works by the stored "
            "settings: 'taskqueue apply %s' writes the declarations, with --dry-run it shows the differences",
            _first(differing),
            target,
        )


def _first(queues: list[str]) -> str:
    more = len(queues) - _SHOWN
    return "; ".join([*queues[:_SHOWN], *([f"and {more} more"] if more > 0 else [])])


async def _differing(
    backend: Backend, declared: Mapping[str, Mapping[str, Any]], handlers: Handlers
) -> list[str]:
    control, differing = control_of(backend), []
    for key, fields in declared.items():
        settings = await control.settings(key)
        if settings.owner_of("timeout") is not None:
            handlers.timeouts.pop(key, None)
        elif fields.get("timeout") is not None:
            handlers.timeouts[key] = fields["timeout"]
        found = Comparison(key, fields, settings)
        names = [each.field for each in (*found.changed, *found.undeclared)]
        names += [f"{each.field} (set by an operator)" for each in found.kept]
        if names:
            differing.append(f"{key}: {', '.join(names)}")
    return differing

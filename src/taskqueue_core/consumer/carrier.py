"""Carries lines between the partitions of a store, so that children learn about their parents.

A server and a local worker run one carrier each. Several carriers may carry the same lines at once: see
`taskqueue_core.capabilities.dependencies`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Sequence

from taskqueue_core.capabilities import Dependencies, Line, LineKind, Report
from taskqueue_core.consumer.outage import Failures
from taskqueue_core.errors import TaskQueueError
from taskqueue_core.tasks import Task

_PAGE = 1000
_EVERY = 5.0
"""seconds after which lines are read again without a notification, on average"""
_SECONDS = 30.0
"""maximum duration of a call"""
_NOT_CARRIED = "dependencies were not carried"
_log = logging.getLogger("taskqueue.dependencies")


async def run_carrier(dependencies: Dependencies) -> None:
    """Carry lines until cancelled: when there may be new ones, and otherwise about every five seconds.

    Log only the first of several failures in a row.
    """
    failures = Failures(_log, _NOT_CARRIED)
    while True:
        try:
            carried, left = await carry(dependencies, failures)
        except Exception as error:  # noqa: BLE001 - the loop must continue after any error
            failures.add(error)
        else:
            if not left:
                failures.clear()
            if carried:
                continue
        try:
            if failures.number:
                await asyncio.sleep(failures.pause)
            else:
                usual = _EVERY * random.uniform(0.75, 1.25)  # noqa: S311 - it only spreads the load
                await dependencies.changed(usual)
        except Exception as error:  # noqa: BLE001 - as above
            failures.add(error)


async def register(dependencies: Dependencies, tasks: Sequence[Task]) -> None:
    """Return when no partition has to be asked any more whether it knows a parent of these tasks.

    Otherwise, a parent could run, end and be forgotten before its child has asked for it.
    """
    children = {(task.key, task.id) for task in tasks}
    failures = Failures(_log, _NOT_CARRIED)
    while await _unanswered(dependencies, children):
        _, left = await carry(dependencies, failures)
        if left:
            await asyncio.sleep(failures.pause)


async def _unanswered(dependencies: Dependencies, children: set[tuple[str, str]]) -> bool:
    after = None
    while lines := await dependencies.lines(_PAGE, after):
        for line in lines:
            child = line.child
            if line.kind is not LineKind.REGISTER or child is None:
                continue
            if (child.key, child.task_id) in children:
                return True
        after = lines[-1].id
    return False


async def carry(dependencies: Dependencies, failures: Failures | None = None) -> tuple[int, int]:
    """Carry all lines once. Return how many were carried, and how many are left because a partition did not answer.

    ``failures`` counts the errors of partitions that did not answer.
    """
    carried = left = 0
    after = None
    while lines := await dependencies.lines(_PAGE, after):
        failed = await _carry_page(dependencies, lines, failures)
        if failed:  # do not read them again
            after = lines[-1].id
        carried, left = carried + len(lines) - failed, left + failed
    return carried, left


async def _carry_page(
    dependencies: Dependencies, lines: Sequence[Line], failures: Failures | None
) -> int:
    """Carry some lines. Return the number of those that a partition did not take."""
    try:
        return await _carry_lines(dependencies, lines)
    except (TaskQueueError, TimeoutError) as error:
        groups = itertools.groupby(sorted(lines, key=_target), key=_target)
        parts = [list(group) for _, group in groups]
        if len(parts) == 1:
            if failures is not None:
                failures.add(error)
            return len(lines)
        # A partition that is unavailable must not hold up the lines to the others.
        return sum([await _carry_page(dependencies, part, failures) for part in parts])


def _target(line: Line) -> str:
    """Return the queue to which a line is carried."""
    if line.kind is LineKind.END and line.child is not None:
        return line.child.key
    return line.parent.key


async def _carry_lines(dependencies: Dependencies, lines: Sequence[Line]) -> int:
    """Carry some lines, or raise an error. Return the number of those that must be carried again."""
    again: set[str] = set()
    async with asyncio.timeout(_SECONDS):
        registrations = [line for line in lines if line.kind is LineKind.REGISTER]
        reports = [report_in(line) for line in lines if line.kind is LineKind.END]
        if registrations:
            answers = await dependencies.register(*registrations)
            for line, answer in zip(registrations, answers, strict=True):
                if answer is None:
                    again.add(line.id)
                elif answer.state is None or not answer.state.live:
                    # A child that is noted at a live parent needs no answer.
                    reports.append(answer)
        if reports:
            await dependencies.release(*reports)
        for line in lines:
            if line.kind is LineKind.CLOSE:
                await dependencies.tally(*await dependencies.seal(line.parent), sealed=True)
        if counts := [line.count for line in lines if line.count is not None]:
            await dependencies.tally(*counts)
        await dependencies.confirm(*[line for line in lines if line.id not in again])
    return len(again)


def report_in(line: Line) -> Report:
    """Return the report in a line ``end``."""
    if line.child is None:
        raise ValueError("a line 'end' without a child")
    return Report(
        parent=line.parent,
        child=line.child,
        entry=line.entry,
        state=line.state,
        version=line.version,
        result=line.result,
    )

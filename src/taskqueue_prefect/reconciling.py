"""The database says what is scheduled; what the queue has not, though it should, is put in again.

That is: a run that was never put in or that the store has lost; and one that a worker has accepted and will not begin,
as the worker is gone. Any replica does it, all may at once: each rescue has a token. Nothing is taken for lost at first
sight.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING
from uuid import UUID

import msgspec

from taskqueue_core.errors import TaskQueueError
from taskqueue_core.tasks import State, TaskStatus, WorkerInfo
from taskqueue_prefect import runs, scheduling
from taskqueue_prefect.host import Host
from taskqueue_prefect.names import name_of
from taskqueue_prefect.runs import Accepted

if TYPE_CHECKING:
    from prefect.server.schemas.core import TaskRun

__all__ = ["Reconciler", "reconcile"]

_PAGE = 200
_FIRST = UUID(int=0)
_JITTER = 0.25
_log = logging.getLogger("prefect.taskqueue")
_accepted = msgspec.json.Decoder(Accepted)


async def reconcile(host: Host) -> None:
    """Do a pass again and again, until cancelled. A pass that fails is logged once per series."""
    reconciler = Reconciler(host)
    failing = False
    while True:
        try:
            await reconciler.look_once()
            failing = False
        except Exception as error:  # noqa: BLE001 - the loop must not end silently
            if not failing:
                known = isinstance(error, TaskQueueError)
                _log.warning("reconciling fails: %s", error, exc_info=None if known else error)
            failing = True
        spread = random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311 - spreads load, no secret
        await asyncio.sleep(host.settings.reconcile * spread)


class Reconciler:
    """Holds the database against the queue."""

    def __init__(self, host: Host) -> None:
        """Have seen nothing."""
        self._host = host
        self._missed: dict[tuple[str, str], float] = {}
        """since when a run in a state has looked lost"""

    async def look_once(self) -> int:
        """Look at every scheduled run; return how many were put in again."""
        seen: dict[tuple[str, str], float] = {}
        last, rescued = _FIRST, 0
        while page := await runs.scheduled_after(last, _PAGE):
            last = page[-1].id
            deferred = [run for run in page if runs.is_scheduled(run)]
            rescued += await self._look_at(deferred, seen)
        self._missed = seen
        return rescued

    async def _look_at(self, page: Sequence[TaskRun], seen: dict[tuple[str, str], float]) -> int:
        workers = {one.worker_id: one for one in await self._host.control.workers()}
        now, rescued = time.monotonic(), 0
        for key in {name_of(run.task_key) for run in page}:
            mine = [run for run in page if name_of(run.task_key) == key]
            ids = [str(run.id) for run in mine]
            statuses = await self._host.control.statuses(key, *ids)
            results = await self._host.control.results(key, *ids)
            for run, status, result in zip(mine, statuses, results, strict=True):
                if not self._is_missing(run, status, result, workers):
                    continue
                mark = str(run.id), runs.state_id(run)
                seen[mark] = self._missed.get(mark, now)
                if now - seen[mark] >= self._host.settings.grace:
                    del seen[mark]
                    await self._rescue(run, status)
                    rescued += 1
        return rescued

    def _is_missing(
        self,
        run: TaskRun,
        status: TaskStatus | None,
        result: bytes | None,
        workers: dict[str, WorkerInfo],
    ) -> bool:
        if status is None:
            return True
        if status.state is not State.DONE:
            return False  # it is there, or was ended by an operator
        accepted = None if result is None else _accepted.decode(result)
        if accepted is None or accepted.worker is None or accepted.state != runs.state_id(run):
            return True
        worker = workers.get(name_of(accepted.worker))
        if worker is None:
            return True
        # Another connection than the one that it was accepted on: the process may be another one, too.
        anew = worker.since > status.updated_at
        return anew and self._host.backend.now() - worker.since > self._host.settings.held

    async def _rescue(self, run: TaskRun, status: TaskStatus | None) -> None:
        _log.warning("run %s was scheduled and is not in the queue: it is put in again", run.id)
        if status is None:
            await scheduling.put(self._host, run)
            return
        at = runs.due_at(run)
        await self._host.backend.publisher.schedule_retry(
            runs.task_of(run),
            max(at or 0.0, self._host.backend.now()),
            token=f"{runs.state_id(run)}.{status.attempt}",
        )

"""Reconciling the queue with the database: scheduled runs that are missing from the queue are enqueued again.

A run is missing if it was never enqueued, if the store has lost it, or if the worker that accepted it is gone and has
not begun it, whether the run is still scheduled or pending. It is enqueued again only after it has been missing for
some time. All replicas may reconcile at the same time, because
enqueuing the same run a second time has no effect.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from uuid import UUID

import msgspec

from taskqueue_core.consumer.outage import OUTAGE_ERRORS
from taskqueue_core.errors import TaskQueueError
from taskqueue_core.tasks import State, TaskStatus, WorkerInfo
from taskqueue_prefect import enqueue, task_runs
from taskqueue_prefect.context import LOG, Host
from taskqueue_prefect.names import client_of, name_of
from taskqueue_prefect.task_runs import AcceptedRun, Run

_PAGE_SIZE = 200
_FIRST_ID = UUID(int=0)
_JITTER_SHARE = 0.25
_RUNS_PER_SECOND = 300
"""number of runs that are read per second on average; a pass over many runs is followed by a longer pause

Reading one run takes about 26 µs of the processor, so that passes take less than 1 % of it.
"""
Mark = tuple[str, str]
"""ids of a run and of its state"""
_accepted = msgspec.json.Decoder(AcceptedRun)


async def reconcile(host: Host) -> None:
    """Compare the database with the queue periodically, until cancelled. Log only the first of consecutive failures."""
    reconciler = Reconciler(host)
    failing = False
    while True:
        try:
            await reconciler.check_once()
            failing = False
        except Exception as error:  # noqa: BLE001 - the loop must not end silently
            if not failing:
                known = isinstance(error, TaskQueueError)
                LOG.warning("reconciliation failed: %s", error, exc_info=None if known else error)
            failing = True
            host.forget()
        spread = random.uniform(1 - _JITTER_SHARE, 1 + _JITTER_SHARE)  # noqa: S311 - jitter needs no cryptography
        await asyncio.sleep(reconciler.pause * spread)


class Reconciler:
    """Compares the database with the queue, and enqueues missing runs again."""

    def __init__(self, host: Host, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._host = host
        self._monotonic = monotonic
        self._missing_since: dict[Mark, float] = {}
        """time (monotonic clock) at which each run, in its current state, was first found missing from the queue"""
        self._reported: set[Mark] = set()
        """runs for which an error has already been logged"""
        self._full_queues: set[str] = set()
        """queues that were full in the current pass, and are not tried again until the next pass"""
        self._read = 0
        """number of runs that the last pass has read"""

    @property
    def pause(self) -> float:
        """Seconds to wait after the last pass, before jitter."""
        slowest = self._read / _RUNS_PER_SECOND / (1 - _JITTER_SHARE)
        return max(self._host.settings.reconcile, slowest)

    async def check_once(self) -> int:
        """Check every run that waits for a worker, or is pending. Return how many runs were enqueued again."""
        observed: dict[Mark, float] = {}
        self._full_queues.clear()
        last, restored, self._read = _FIRST_ID, 0, 0
        try:
            while page := await task_runs.scheduled_after(last, _PAGE_SIZE):
                last = page[-1].id
                self._read += len(page)
                candidates = [run for run in page if run.deferred or run.pending]
                restored += await self._check_page(candidates, observed)
        except BaseException:
            self._missing_since |= observed
            raise
        finally:
            if restored:
                LOG.warning(
                    "runs that waited and were not in the queue, enqueued again: %d", restored
                )
        self._missing_since = observed
        self._reported &= observed.keys()
        return restored

    async def _check_page(self, page: Sequence[Run], observed: dict[Mark, float]) -> int:
        workers = await self._host.control.workers()
        now, restored = self._monotonic(), 0
        for key in {name_of(run.task_key) for run in page}:
            runs = [run for run in page if name_of(run.task_key) == key]
            ids = [str(run.id) for run in runs]
            statuses = await self._host.control.statuses(key, *ids)
            results = await self._host.control.results(key, *ids)
            for run, status, result in zip(runs, statuses, results, strict=True):
                required_age = self._required_age(run, status, result, workers)
                if required_age is None:
                    continue
                mark = str(run.id), run.state_id
                observed[mark] = self._missing_since.get(mark, now)
                if now - observed[mark] >= required_age and await self._restore(run, key, status):
                    del observed[mark]
                    restored += 1
        return restored

    def _required_age(
        self,
        run: Run,
        status: TaskStatus | None,
        result: bytes | None,
        workers: Sequence[WorkerInfo],
    ) -> float | None:
        """Return how many seconds a run must be missing before it is enqueued again; ``None`` if it is not missing."""
        settings = self._host.settings
        if status is None:
            return None if self._may_be_held(run, workers) else settings.grace
        if status.state is not State.DONE:
            # The run is still in the queue, has become a dead letter, or was ended by an operator.
            return None
        accepted = None if result is None else _accepted.decode(result)
        if accepted is None or accepted.worker is None:
            return settings.grace
        if not run.pending and accepted.state != run.state_id:
            return settings.grace
        if any(worker.worker_id == accepted.worker for worker in workers):
            return None
        # A worker with the same client id may be the same process after a reconnect, or a different process.
        client = client_of(accepted.worker)
        reconnected = any(client_of(worker.worker_id) == client for worker in workers)
        return settings.held if reconnected else settings.grace

    def _may_be_held(self, run: Run, workers: Sequence[WorkerInfo]) -> bool:
        """Return whether a worker may have accepted the run so long ago that the queue has forgotten the run."""
        forgotten = self._host.backend.now() - self._host.settings.remember
        key = name_of(run.task_key)
        return run.state_time.timestamp() < forgotten and any(
            worker.since < forgotten and key in worker.keys for worker in workers
        )

    async def _restore(self, run: Run, key: str, status: TaskStatus | None) -> bool:
        """Enqueue a run again; return whether it was stored. Raises only errors of an outage, and logs all others."""
        if key in self._full_queues:
            return False
        try:
            if run.pending:
                return await task_runs.schedule_again(run)
            if status is None:
                confirmation = await enqueue.offer(self._host, run)
                reason = confirmation.reason
            else:
                at = max(run.due_at or 0.0, self._host.backend.now())
                confirmation = await self._host.backend.publisher.schedule_retry(
                    task_runs.task_of(run), at, token=f"{run.state_id}.{status.attempt}"
                )
                reason = None
        except OUTAGE_ERRORS:
            raise
        except Exception as error:  # noqa: BLE001 - the error concerns only one run, and the other runs must still be checked
            stored, reason = False, str(error)
        else:
            stored = confirmation.stored
            if not stored:
                self._full_queues.add(key)
        mark = str(run.id), run.state_id
        if not stored and mark not in self._reported:
            self._reported.add(mark)
            LOG.warning("run %s is not in the queue and cannot be enqueued: %s", run.id, reason)
        return stored

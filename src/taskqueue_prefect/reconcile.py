"""Reconciling the queue with the database: scheduled runs that are missing from the queue are enqueued again.

A run is missing if it was never enqueued, if the store has lost it, or if the worker that accepted it is gone and has
not begun it, whether the run is still scheduled or pending. It is enqueued again only after it has been missing for
some time. One process reconciles: see `ReconcileLease`. If two do for a moment, nothing happens, because enqueuing the
same run a second time has no effect.

A full pass reads all runs that wait. The passes until the next one read only runs that have changed, and those that
were missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from secrets import token_hex
from uuid import UUID

import msgspec

from taskqueue_core.backend import Subscription
from taskqueue_core.consumer.outage import OUTAGE_ERRORS, close
from taskqueue_core.errors import SettingsConflict, TaskQueueError
from taskqueue_core.tasks import Delivery, State, Task, TaskStatus, WorkerInfo
from taskqueue_prefect import enqueue, task_runs
from taskqueue_prefect.batching import is_current
from taskqueue_prefect.context import LOG, Host
from taskqueue_prefect.names import RECEIVER, client_of, connection_of, name_of
from taskqueue_prefect.task_runs import AcceptedRun, Mark, Run

KEY = "prefect.reconcile"
"""queue of the lease"""
_TASK = Task(key=KEY, id="lease")
_MAX_LOSSES = 1000
_CHECK_SECONDS = 60.0
"""maximum number of seconds between two checks that the task is live while waiting for the lease"""
_PAGE_SIZE = 200
_FIRST_ID = UUID(int=0)
_JITTER_SHARE = 0.25
_RUNS_PER_SECOND = 200
"""number of runs that full passes read per second on average

Reading one run takes about 26 µs of the processor, so that full passes take about 0.5 % of it.
"""
_MAX_REFUSED = 2000
"""maximum number of runs that could not be enqueued, for example because their queue is full, to be tried in a pass"""
_OVERLAP = timedelta(seconds=60)
"""age up to which changed runs are read again: a transaction may take that long, and clocks may differ as much"""
_accepted = msgspec.json.Decoder(AcceptedRun)


async def reconcile(host: Host) -> None:
    """Compare the database with the queue periodically, while this process has the lease, until cancelled.

    Only the first of consecutive failures is logged. A pass that follows a failed one is a full pass.
    """
    lease, reconciler = ReconcileLease(host), Reconciler(host)
    failing = False
    try:
        while True:
            try:
                if not await lease.is_held():
                    await lease.acquire()
                    reconciler = Reconciler(host)
                await reconciler.check_once()
                failing = False
            except Exception as error:  # noqa: BLE001 - the loop must not end silently
                if not failing:
                    known = None if isinstance(error, TaskQueueError) else error
                    LOG.warning("reconciliation failed: %s", error, exc_info=known)
                failing = True
                host.forget()
            spread = random.uniform(1 - _JITTER_SHARE, 1 + _JITTER_SHARE)  # noqa: S311 - jitter needs no cryptography
            await asyncio.sleep(host.settings.reconcile * spread)
    finally:
        await lease.release()


class Reconciler:
    """Compares the database with the queue, and enqueues missing runs again."""

    def __init__(
        self,
        host: Host,
        monotonic: Callable[[], float] = time.monotonic,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._host = host
        self._clock = clock
        self._monotonic = monotonic
        self._missing_since: dict[Mark, float] = {}
        """time (monotonic clock) at which each run, in its current state, was first found missing from the queue"""
        self._refused: set[Mark] = set()
        """missing runs that could not be enqueued; the reason was logged, unless their queue was known to be full"""
        self._full_queues: set[str] = set()
        """queues that were full in the current pass, and are not tried again until the next pass"""
        self._restored = 0
        """number of runs that the current pass has enqueued again"""
        self._full_at = -math.inf
        """time (monotonic clock) of the next full pass"""
        self._changed_since = task_runs.NEVER
        """time since which the next pass reads changes"""
        self._recent: set[Mark] = set()
        """runs that the last pass has read, and that the next one may read again although they have not changed"""

    async def check_once(self) -> int:
        """Check runs that wait for a worker, or are pending. Return how many runs were enqueued again."""
        observed: dict[Mark, float] = {}
        self._full_queues.clear()
        self._restored, begun = 0, self._monotonic()
        try:
            if begun >= self._full_at:
                read = await self._check_all(observed)
                self._full_at = begun + read / _RUNS_PER_SECOND
            else:
                await self._check_changes(observed)
        except BaseException:
            self._full_at = -math.inf
            self._missing_since |= observed
            raise
        finally:
            if self._restored:
                LOG.warning(
                    "runs that waited and were not in the queue, enqueued again: %d",
                    self._restored,
                )
        self._missing_since = observed
        self._refused &= observed.keys()
        return self._restored

    def _overlap_start(self) -> datetime:
        return datetime.fromtimestamp(self._clock(), UTC) - _OVERLAP

    async def _check_all(self, observed: dict[Mark, float]) -> int:
        """Check all runs. Return how many were read."""
        self._changed_since = self._overlap_start()
        last, read = _FIRST_ID, 0
        while page := await task_runs.scheduled_after(last, _PAGE_SIZE):
            last = page[-1].id
            read += len(page)
            await self._check_page(page, observed)
        return read

    async def _check_changes(self, observed: dict[Mark, float]) -> None:
        """Check the runs that were missing, and those that have changed. Those that were refused take turns."""
        refused = [mark for mark in self._missing_since if mark in self._refused]
        observed.update((mark, self._missing_since[mark]) for mark in refused[_MAX_REFUSED:])
        missing = [mark for mark in self._missing_since if mark not in self._refused]
        again = [UUID(run) for run, _ in missing + refused[:_MAX_REFUSED]]
        checked = self._recent
        for start in range(0, len(again), _PAGE_SIZE):
            page = await task_runs.scheduled_among(again[start : start + _PAGE_SIZE])
            await self._check_page(page, observed)
            checked |= {run.mark for run in page}
        self._recent, last = set(), (self._changed_since, _FIRST_ID)
        self._changed_since = self._overlap_start()
        while page := await task_runs.scheduled_since(*last, _PAGE_SIZE):
            last = page[-1].updated, page[-1].id
            await self._check_page([run for run in page if run.mark not in checked], observed)
            self._recent |= {run.mark for run in page}

    async def _check_page(self, page: Sequence[Run], observed: dict[Mark, float]) -> None:
        page = [run for run in page if run.deferred or run.pending]
        if not page:
            return
        workers = await self._host.control.workers()
        now = self._monotonic()
        for key in {name_of(run.task_key) for run in page}:
            runs = [run for run in page if name_of(run.task_key) == key]
            ids = [str(run.id) for run in runs]
            statuses = await self._host.control.statuses(key, *ids)
            results = await self._host.control.results(key, *ids)
            for run, status, result in zip(runs, statuses, results, strict=True):
                required_age = self._required_age(run, status, result, workers)
                if required_age is None:
                    continue
                since = observed[run.mark] = self._missing_since.get(run.mark, now)
                if now - since >= required_age and await self._restore(run, key, status):
                    del observed[run.mark]
                    self._restored += 1

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
            worker.since < forgotten
            and key in worker.keys
            and client_of(worker.worker_id) != RECEIVER  # a server's connection, which may be older
            for worker in workers
        )

    async def _restore(self, run: Run, key: str, status: TaskStatus | None) -> bool:
        """Enqueue a run again; return whether it was stored. Raises only errors of an outage, and logs all others."""
        if key in self._full_queues:
            self._refused.add(run.mark)
            return False
        if not self._restored:
            self._host.forget()  # a store that has lost runs may have lost settings of queues as well
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
        if not stored and run.mark not in self._refused:
            self._refused.add(run.mark)
            LOG.warning("run %s is not in the queue and cannot be enqueued: %s", run.id, reason)
        return stored


class ReconcileLease:
    """The delivery of a task that is never acked. The process that has the delivery holds the lease.

    If that process ends, the task is delivered to another one. If the backend is not shared, each process holds its
    own lease.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._subscription: Subscription | None = None
        self._delivery: Delivery | None = None

    async def acquire(self) -> None:
        """Wait until this process holds the lease."""
        await self.release()
        if not self._host.backend.capabilities.shared:
            return
        settings = await self._host.control.settings(KEY)
        if settings.max_losses != _MAX_LOSSES:
            changes = {"max_losses": _MAX_LOSSES}
            with contextlib.suppress(SettingsConflict):  # another process has configured the queue
                await self._host.control.configure(KEY, settings.model_copy(update=changes))
        name = connection_of(RECEIVER, token_hex(4))
        self._subscription = self._host.backend.subscribe([KEY], name)
        while self._delivery is None:
            await self._enqueue()
            deliveries = (await self._subscription.receive(1, _CHECK_SECONDS)).deliveries
            if deliveries and deliveries[0].losses:
                # Start a new attempt, which has no losses, so that the task never becomes a dead letter.
                (delivery,) = deliveries
                await self._host.backend.publisher.schedule_retry(
                    _TASK, self._host.backend.now(), token=token_hex(16), settles=delivery
                )
            elif deliveries:
                (self._delivery,) = deliveries

    async def _enqueue(self) -> None:
        """Enqueue the task if it is not live: it may be missing, or may have been ended by another client or by damage.

        A publish has no effect on a dead letter, or soon after the task has ended.
        """
        publisher = self._host.backend.publisher
        (status,) = await self._host.control.statuses(KEY, _TASK.id)
        if status is None:
            await publisher.publish(_TASK)
        elif not status.state.live:
            token = f"{status.state}.{status.attempt}.{status.updated_at}"  # only one wins
            await publisher.schedule_retry(_TASK, self._host.backend.now(), token=token)

    async def is_held(self) -> bool:
        """Return whether this process holds the lease, which it loses if it is suspended for too long."""
        if self._delivery is None:
            return not self._host.backend.capabilities.shared
        (status,) = await self._host.control.statuses(KEY, _TASK.id)
        return is_current(status, self._delivery)

    async def release(self) -> None:
        """Release the lease, so that another process can take it."""
        subscription, self._subscription, self._delivery = self._subscription, None, None
        if subscription is not None:
            await close(subscription)

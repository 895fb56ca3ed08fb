"""One attempt of one job, from sending the job to a server to settling its delivery.

::

    poll (if the job may have been sent before) -> send -> poll, or wait for a push -> release the slot -> report
    -> settle
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import NamedTuple

from taskqueue_core import retry
from taskqueue_core.backend import Subscription
from taskqueue_core.capabilities import Permit
from taskqueue_core.consumer.outage import OUTAGE_ERRORS
from taskqueue_core.consumer.settle import Settler, settle
from taskqueue_core.errors import TaskQueueError
from taskqueue_core.limits import LIMITS
from taskqueue_core.retry import Bury, Redeliver, Rejected, RetryPolicy, Verb
from taskqueue_core.tasks import Delivery, Settled
from taskqueue_dispatch.endpoint_client.answers import (
    Answer,
    Busy,
    Done,
    EndpointUnreachable,
    JobAcceptedAnswer,
    JobFailedAnswer,
    JobRunningAnswer,
    Missing,
)
from taskqueue_dispatch.job_notes import answer_of, result_note
from taskqueue_dispatch.lease_renewal import RenewedLease
from taskqueue_dispatch.models import ModelConfig
from taskqueue_dispatch.remote_job import RemoteJob, polled
from taskqueue_dispatch.runner_context import RunnerContext

_OVERTIME = "Exceeded max processing time"
_STALE = ""
"""a token that is never valid; the pool stores a note that is sent with it as a late note"""
_LOST = "max_losses_exceeded"
_MARGIN = 60.0
"""seconds by which the lease of a detached slot exceeds the time limit of its job"""
_KEEP_SECONDS = 15.0
"""seconds between two reports of progress for a job over its time"""
_FINAL_SECONDS = 0.5
"""maximum number of seconds for the last store calls about a job that this dispatcher gives up"""
_log = logging.getLogger("taskqueue.dispatch")


class AttemptOwner(NamedTuple):
    """The parts of the runner that an attempt uses to settle its job and to return its slot."""

    subscription: Subscription
    settlements: Settler
    release_slot: Callable[[RenewedLease], None]
    """function that returns a slot to the runner when the job no longer uses it"""
    check_later: Callable[[float], None]
    """function that makes the runner look for slots after a number of seconds, when an endpoint's pause has ended"""


class JobAttempt:
    """One attempt of a job. It owns a delivery and the slot assigned to it."""

    def __init__(
        self, delivery: Delivery, held: RenewedLease, context: RunnerContext, owner: AttemptOwner
    ) -> None:
        self._delivery = delivery
        self._held = held
        self._context = context
        self._owner = owner
        view = context.registry.view(held.lease.model)
        self._config = ModelConfig() if view is None else view.config
        self._job = RemoteJob(delivery, held, self._config, context)
        self._allowed = False
        self._overtime = False
        """whether the job has exceeded its time limit, and the attempt only waits until the slot is free"""
        self._kept_at = -math.inf

    async def run(self) -> None:
        """Run the attempt to its end.

        If it is cancelled, a job that was sent stays on its server for the next dispatcher.
        """
        started, undecided = time.monotonic(), False
        try:
            answer = await self._unless_lost(self._answer()) or await self._final_answer()
            if self._overtime and not isinstance(answer, Done):
                by_server = isinstance(answer, EndpointUnreachable)
                answer = JobFailedAnswer(_OVERTIME, by_server=by_server)
            if answer is None:
                answer = EndpointUnreachable("the slot was lost", sent=self._job.sent)
                undecided = True
        except asyncio.CancelledError:
            if self._job.sent:
                await self._leave_running()
            else:
                self._owner.release_slot(self._held)
            raise
        except Exception:  # noqa: BLE001 - whatever the error is, the slot and the job must be released
            _log.exception("could not complete a job")
            answer = EndpointUnreachable("internal error of the dispatcher", sent=True)
            undecided = True
        if isinstance(answer, Done):
            self._context.estimates.note(self._held.lease.model, time.monotonic() - started)
        await self._conclude(answer, undecided=undecided)

    async def _conclude(self, answer: Answer, *, undecided: bool) -> None:
        """Release the slot and settle the job. If ``undecided``, the answer does not show whether the server works.

        A cancelled call still completes if the store responds in time, because the client may have been notified of the
        end already. Otherwise the job is redelivered as lost.
        """
        settling = asyncio.create_task(self._release_and_settle(answer, undecided=undecided))
        try:
            await asyncio.shield(settling)
        except asyncio.CancelledError:
            await asyncio.wait([settling], timeout=_FINAL_SECONDS / 2)
            if settling.cancel():
                await asyncio.wait([settling])
                await self._redeliver_as_lost(answer)
            raise
        finally:
            settling.cancel()
            await asyncio.gather(settling, return_exceptions=True)

    async def _release_and_settle(self, answer: Answer, *, undecided: bool) -> None:
        try:
            if undecided:
                self._context.breaker.undecided(self._held.lease.model, self._held.lease.server)
            else:
                await self._update_breaker(answer)
        finally:
            self._owner.release_slot(self._held)
        await self._settle_answer(answer)

    async def _unless_lost(self, work: Coroutine[None, None, Answer]) -> Answer | None:
        """Return the result of ``work``, or ``None`` if the slot is revoked first."""
        work_task = asyncio.create_task(work)
        lost = asyncio.create_task(self._held.lost.wait())
        try:
            await asyncio.wait([work_task, lost], return_when=asyncio.FIRST_COMPLETED)
            answer = work_task.result() if work_task.done() else None
            unsent = isinstance(answer, EndpointUnreachable) and not answer.sent
            return None if unsent and self._held.lost.is_set() else answer
        finally:
            work_task.cancel()
            lost.cancel()
            await asyncio.gather(work_task, lost, return_exceptions=True)

    async def _final_answer(self) -> Answer | None:
        """Poll once more after the slot was revoked, because the server may have finished the job.

        Return ``None`` unless the server reports that the job has ended. Poll only for a job that was sent.
        """
        if not (self._job.sent and self._job.asks):
            return None
        response = await self._job.ask()
        return response if isinstance(response, Done | JobFailedAnswer) else None

    async def _answer(self) -> Answer:
        before = await self._job.find()
        if before is not None:
            self._job.begin()
            return await self._follow(before)
        lease = self._held.lease
        self._allowed = self._context.breaker.allows(lease.model, lease.server)
        if not self._allowed:
            return Busy()
        sent = await self._send()
        if isinstance(sent, Missing):
            return JobFailedAnswer("the endpoint does not exist", by_server=True)
        return await self._follow(sent)

    async def _send(self) -> Answer:
        """Send the job, and return the server's answer.

        A server that reports its jobs may answer after the time limit, because the slot is its own until then.
        """
        reports, partition = self._job.reports, self._context.settings.partition
        sending = asyncio.create_task(self._job.send())
        try:
            while not sending.done() and (remaining := self._remaining) > 0:
                await asyncio.wait([sending], timeout=remaining)
            if not sending.done():
                await self._exceed_time()
            while reports and not sending.done() and self._job.silence <= partition:
                await asyncio.wait([sending], timeout=self._config.poll_interval)
                await self._keep_delivery()
            return sending.result() if sending.done() else EndpointUnreachable(_OVERTIME, sent=True)
        finally:
            sending.cancel()
            await asyncio.wait([sending])

    async def _exceed_time(self) -> None:
        """Ask the server to cancel the job, and wait until the slot is free: only then may the job be tried again.

        If the server reports its jobs, let the lease expire, because some reports only end expired leases.
        """
        self._overtime, self._held.lapsing = True, self._job.reports
        await self._job.cancel()
        self._job.check_soon()

    async def _keep_delivery(self) -> None:
        """After the job's time limit, report progress at intervals, so that the delivery does not count as lost."""
        if self._overtime and self._kept_at + _KEEP_SECONDS <= time.monotonic():
            self._kept_at = time.monotonic()
            with contextlib.suppress(*OUTAGE_ERRORS):
                await self._context.control.progress(self._delivery, _OVERTIME)

    async def _follow(self, answer: Answer) -> Answer:
        """Poll, or wait for a push, until the job has ended, is lost or exceeds its time limit. Return the outcome."""
        unreachable_since, missing = None, 0
        while True:
            if isinstance(answer, JobAcceptedAnswer | JobRunningAnswer):
                unreachable_since, missing = None, 0
                await self._record_progress(answer)
            elif isinstance(answer, EndpointUnreachable) and answer.sent and self._can_wait:
                if unreachable_since is None:
                    unreachable_since = time.monotonic()
                    self._job.check_soon()
                passed = time.monotonic() - unreachable_since
                silent = passed if self._job.asks else self._job.silence
                if silent > self._context.settings.partition:
                    return answer
            elif isinstance(answer, Missing):
                missing += 1
                # After a second `Missing`, the job counts as lost, for example because the server has restarted.
                if missing > 1:
                    gone = EndpointUnreachable("the server no longer knows the job", sent=True)
                    return JobFailedAnswer(_OVERTIME) if self._overtime else gone
            else:
                return answer
            answer = await self._next(answer)

    async def _next(self, answer: Answer) -> Answer:
        """Wait for a pushed result, or poll after the interval. Return the newest answer."""
        if self._remaining <= 0 and not self._overtime:
            if not self._can_wait:
                return JobFailedAnswer(_OVERTIME)
            await self._exceed_time()
        await self._keep_delivery()
        pause = self._config.poll_interval
        if not self._overtime:
            pause = min(pause, max(0.0, self._remaining))
        try:
            async with asyncio.timeout(pause):
                await self._held.noted.wait()
        except TimeoutError:
            return polled(await self._job.ask()) if self._job.asks else answer
        self._held.noted.clear()
        note = self._held.note
        response = None if note is None else answer_of(note)
        return answer if response is None or isinstance(response, JobAcceptedAnswer) else response

    async def _record_progress(self, answer: JobAcceptedAnswer | JobRunningAnswer) -> None:
        """Record the progress, or the server's id for the job; detach the slot so that it outlives this dispatcher."""
        if isinstance(answer, JobRunningAnswer):
            if answer.progress is not None:
                with contextlib.suppress(*OUTAGE_ERRORS):
                    # A lost progress report is not sent again, because the next one replaces it.
                    await self._context.control.progress(self._delivery, answer.progress)
        else:
            self._job.remote_id = answer.remote_id
        if self._held.lease.state is Permit.DETACHED:
            return
        await self._context.store.retry_until_available(self._detach)
        if self._job.remote_id != self._delivery.task.id:
            # Store where the job is, for its next attempt.
            lease, job, note = self._held.lease, self._delivery.task.id, self._job.note
            leave = partial(self._context.pool.leave, lease.model, job, lease.token, note)
            await self._context.store.retry_until_available(leave)

    async def _detach(self) -> None:
        held = self._held
        (lease,) = await self._context.pool.detach(
            held.lease, ttl=max(0.0, self._remaining) + _MARGIN
        )
        if lease is None:
            held.lost.set()
        else:
            self._context.renewer.change(held, lease)

    async def _leave_running(self) -> None:
        """Leave the job running on its server.

        The dispatcher that receives the job next takes over its detached slot or, if the slot has ended by then, finds
        the note, and asks the server.
        """
        lease, job = self._held.lease, self._delivery.task.id
        self._context.limits.ended(lease.model, lease.server)
        try:
            async with asyncio.timeout(_FINAL_SECONDS):
                await self._detach()
                await self._context.pool.leave(lease.model, job, lease.token, self._job.note)
        except (TaskQueueError, TimeoutError):
            _log.warning(
                "could not detach a job's slot, or store where the job is; the slot may become free before the job ends"
            )
        self._context.renewer.drop(self._held)

    async def _redeliver_as_lost(self, answer: Answer) -> None:
        """If the job may have run, redeliver it as lost, so that the next dispatcher polls for it before sending it."""
        unsent = isinstance(answer, EndpointUnreachable) and not answer.sent
        if unsent or isinstance(answer, Busy):
            return
        with contextlib.suppress(TaskQueueError, TimeoutError):
            async with asyncio.timeout(_FINAL_SECONDS / 2):
                await self._owner.subscription.redeliver(self._delivery, lost=True)

    @property
    def _can_wait(self) -> bool:
        """Whether the dispatcher can find out that the server no longer runs the job."""
        return self._job.asks or self._job.reports

    @property
    def _remaining(self) -> float:
        # Time before the job is sent does not count, for example that of a slow connection or a frozen dispatcher.
        begun_at = self._job.begun_at
        passed = 0.0 if begun_at is None else time.monotonic() - begun_at
        return self._config.max_poll_time - passed

    async def _update_breaker(self, answer: Answer) -> None:
        """Update the endpoint's circuit breaker. Pause the endpoint if it is busy, or if the breaker demands it."""
        context, model, server = self._context, self._held.lease.model, self._held.lease.server
        rest: float | None = None
        match answer:
            case Done() | JobFailedAnswer(by_server=False):
                # A job that fails by itself, or is refused, is an answer of a server that works.
                context.breaker.passed(model, server)
            case Busy(retry_after):
                if not self._allowed or await self._job.refused(retry_after):
                    rest = context.settings.busy_rest if retry_after is None else retry_after
                if self._allowed:
                    context.breaker.undecided(model, server)
            case EndpointUnreachable() | JobFailedAnswer():
                rest = context.breaker.failed(model, server)
                context.renewer.checks.check_soon(model, server)
        if rest:
            await context.store.retry_until_available(
                partial(context.pool.rest, model, server, rest)
            )
            self._owner.check_later(rest)

    async def _settle_answer(self, answer: Answer) -> None:
        await self._job.events.stored()
        task = self._delivery.task
        match answer:
            case Done(result):
                late = task.deadline is not None and task.deadline <= self._context.backend.now()
                if not late:
                    await self._context.report(task, "done", result, None)
                results = await self._owner.settlements.ack([(self._delivery, result)])
                if not results[self._delivery.receipt]:
                    # The ack failed, for example because another dispatcher has the job now.
                    await self._keep_late(result)
                elif late:
                    # The deadline has passed. Report the job only after a successful ack: if the job has expired
                    # instead, its expiry callback reports that.
                    await self._context.report(task, "done", result, None)
            case EndpointUnreachable(sent=True):
                await self._settle(Redeliver(lost=True))
            case JobFailedAnswer(error, final):
                outcome = Rejected(answer.reason, error) if final else retry.Failed(error)
                policy = RetryPolicy(max_attempts=self._config.max_retries + 1)
                await self._settle(
                    retry.decide(outcome, self._delivery, policy, self._context.uniform)
                )
            case _:
                await self._owner.settlements.redeliver([self._delivery])

    async def _settle(self, verb: Verb) -> None:
        context, task = self._context, self._delivery.task
        if isinstance(verb, Bury):
            # Report before settling, so that a crash in between causes a second report rather than no report.
            await context.report(task, "failed", None, verb.error or verb.reason)
        settled = await context.store.retry_until_available(
            partial(settle, context.backend, self._owner.subscription, self._delivery, verb)
        )
        if settled is Settled.DEAD and isinstance(verb, Redeliver):
            await context.report(task, "failed", None, _LOST)

    async def _keep_late(self, result: bytes) -> None:
        """Store a result as a late note. The slot was released, and a note with its token could be deleted with it."""
        note = result_note(result)
        if len(note) > LIMITS.result:
            _log.warning(
                "a result that came too late was not kept, because it exceeds the maximum size of a note"
            )
            return
        model, job = self._held.lease.model, self._delivery.task.id
        leave = partial(self._context.pool.leave, model, job, _STALE, note)
        await self._context.store.retry_until_available(leave)

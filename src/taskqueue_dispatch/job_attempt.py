"""One attempt of one job: on its server, and to its end.

::

    ask (where it may have been sent before) -> send -> poll, or wait for the push -> free the slot -> report -> settle
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple

import msgspec

from taskqueue_core import retry
from taskqueue_core.backend import Subscription
from taskqueue_core.capabilities import Permit
from taskqueue_core.consumer.outage import OUTAGE_ERRORS
from taskqueue_core.consumer.settle import Settler, settle
from taskqueue_core.errors import TaskQueueError
from taskqueue_core.retry import Bury, Redeliver, Rejected, RetryPolicy, Verb
from taskqueue_core.tasks import Delivery, Settled
from taskqueue_dispatch.endpoint_client.answers import (
    DONE,
    FAILED,
    Answer,
    Busy,
    Done,
    EndpointUnreachable,
    JobAcceptedAnswer,
    JobFailedAnswer,
    JobRunningAnswer,
    Missing,
    shown,
)
from taskqueue_dispatch.lease_renewal import RenewedLease
from taskqueue_dispatch.models import ModelConfig
from taskqueue_dispatch.runner_context import Parts


class _Pushed(msgspec.Struct):
    status: str
    result: msgspec.Raw = msgspec.Raw(b"null")
    error: Any = None
    final: Any = None
    accepted: str | None = None


_decoder = msgspec.json.Decoder(_Pushed)


def accepted_note(remote_id: str) -> bytes:
    """Return a note that a server knows the job by this id."""
    return msgspec.json.encode({"status": "accepted", "accepted": remote_id})


def answer_of(note: bytes) -> Answer | None:
    """Return what a note says; ``None`` where that is nothing of use."""
    try:
        decoded = _decoder.decode(note)
    except msgspec.MsgspecError:
        return None
    if decoded.status in DONE:
        return Done(bytes(decoded.result))
    if decoded.status in FAILED:
        return JobFailedAnswer(shown(decoded.error), final=decoded.final is True)
    return None if decoded.accepted is None else JobAcceptedAnswer(decoded.accepted)


_OVERTIME = "Exceeded max processing time"
_REFUSED = "refused_by_server"
_LOST = "max_losses_exceeded"
_ASKED = 16
"""servers asked for a job that may have been sent before"""
_MARGIN = 60.0
"""seconds that a slot outlasts the polling of its job"""
_FINAL_SECONDS = 0.5
"""seconds to tell the store what becomes of a job without its dispatcher"""
_log = logging.getLogger("taskqueue.dispatch")


class Ends(NamedTuple):
    """Where a run gives back what it owns."""

    subscription: Subscription
    settlements: Settler
    free: Callable[[RenewedLease], None]
    """takes the slot back once nothing of the job is on it"""
    look_in: Callable[[float], None]
    """has slots looked for after some seconds: a rest is over then"""


class JobAttempt:
    """Owns a delivery and the slot that is bound to it."""

    def __init__(self, delivery: Delivery, held: RenewedLease, parts: Parts, ends: Ends) -> None:
        """Do no input or output."""
        self._delivery = delivery
        self._held = held
        self._parts = parts
        self._ends = ends
        view = parts.registry.view(held.lease.model)
        self._config = ModelConfig() if view is None else view.config
        self._until = time.monotonic() + self._config.max_poll_time
        self._remote_id = delivery.task.id
        self._allowed = False
        self._sent = held.lease.resumed
        """whether its server may have the job"""
        self._url = held.lease.url

    async def go(self) -> None:
        """See the job to the end of this attempt. Cancelled, it leaves the job on its server, for who gets it next."""
        started = time.monotonic()
        try:
            answer = await self._unless_lost(self._answer()) or await self._final_answer()
        except asyncio.CancelledError:
            if self._sent:
                await self._leave()
            else:
                self._ends.free(self._held)
            raise
        except Exception:  # noqa: BLE001 - whatever it is, neither the slot nor the job is kept for it
            _log.exception("could not complete a job")
            answer = EndpointUnreachable("internal error of the dispatcher", sent=True)
        if answer is None:
            self._parts.breaker.undecided(self._held.lease.model, self._held.lease.server)
            self._ends.free(self._held)
            await self._settle(Redeliver(lost=True))
            return
        if isinstance(answer, Done):
            self._parts.estimates.note(self._held.lease.model, time.monotonic() - started)
        try:
            try:
                await self._after(answer)
            finally:
                self._ends.free(self._held)
            await self._conclude(answer)
        except asyncio.CancelledError:
            await self._give_up(answer)
            raise

    # On the server.

    async def _unless_lost(self, work: Coroutine[None, None, Answer]) -> Answer | None:
        """Return the answer, ``None`` where the slot was taken away before there was one."""
        working = asyncio.create_task(work)
        lost = asyncio.create_task(self._held.lost.wait())
        try:
            await asyncio.wait([working, lost], return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            working.cancel()
            lost.cancel()
            await asyncio.gather(working, lost, return_exceptions=True)

    async def _final_answer(self) -> Answer | None:
        """Ask once more where the slot is gone: a server does not run the jobs that have ended either."""
        if not (self._sent and self._asks):
            return None
        response = await self._ask(self._url)
        return response if isinstance(response, Done | JobFailedAnswer) else None

    async def _answer(self) -> Answer:
        before = await self._before()
        if before is not None:
            self._sent = True
            return await self._follow(before)
        lease, delivery = self._held.lease, self._delivery
        self._allowed = self._parts.breaker.allows(lease.model, lease.server)
        if not self._allowed:
            return Busy()
        self._sent = True
        try:
            async with asyncio.timeout(self._remaining):
                sent = await self._parts.caller.send(
                    lease, delivery.task, self._config, attempt=delivery.attempt
                )
        except TimeoutError:
            return JobFailedAnswer(_OVERTIME)
        if isinstance(sent, Missing):
            return JobFailedAnswer("the endpoint does not exist")
        return await self._follow(sent)

    async def _before(self) -> Answer | None:
        """Ask for a job that may have been sent before; ``None`` where it has to be sent."""
        lease, delivery = self._held.lease, self._delivery
        if lease.note is not None and (result := answer_of(lease.note)) is not None:
            return result
        if not self._asks or not (delivery.losses or delivery.attempt > 1 or lease.resumed):
            return None
        if lease.resumed:
            result = await self._ask(lease.url)
            return None if isinstance(result, Missing) else _unheard(result)
        view = self._parts.registry.view(lease.model)
        known = () if view is None else view.endpoints
        urls = dict.fromkeys([lease.url, *(info.endpoint.url for info in known)])
        answers = await asyncio.gather(*(self._ask(url) for url in list(urls)[:_ASKED]))
        for url, result in zip(urls, answers, strict=False):
            if isinstance(result, Done | JobRunningAnswer):
                self._url = url
                return result
        return None

    async def _follow(self, answer: Answer) -> Answer:
        """Ask on until the server has said how the job ended, or its time is over."""
        unheard_since: float | None = None
        missing = 0
        while True:
            now = time.monotonic()
            if isinstance(answer, JobAcceptedAnswer | JobRunningAnswer):
                unheard_since, missing = None, 0
                await self._go_on(answer)
            elif isinstance(answer, EndpointUnreachable) and answer.sent and self._asks:
                unheard_since = unheard_since or now
                if now - unheard_since > self._parts.settings.partition:
                    return answer
            elif isinstance(answer, Missing):
                missing += 1
                # the server began anew, or its word that it has the job was not true
                if missing > 1:
                    return EndpointUnreachable("the server no longer knows the job", sent=True)
            else:
                return answer
            if self._remaining <= 0:
                return JobFailedAnswer(_OVERTIME)
            answer = await self._next(answer)

    async def _next(self, answer: Answer) -> Answer:
        """Wait for a push or until the server may be asked again, and return what there is to know."""
        pause = min(self._config.poll_interval, max(0.0, self._remaining))
        try:
            async with asyncio.timeout(pause):
                await self._held.noted.wait()
        except TimeoutError:
            return _unheard(await self._ask(self._url)) if self._asks else answer
        self._held.noted.clear()
        note = self._held.note
        response = None if note is None else answer_of(note)
        return answer if response is None or isinstance(response, JobAcceptedAnswer) else response

    async def _ask(self, url: str) -> Answer:
        return await self._parts.caller.ask(url, self._remote_id, self._config)

    async def _go_on(self, answer: JobAcceptedAnswer | JobRunningAnswer) -> None:
        """Note that the server has the job: the slot is the job's now, whatever becomes of this dispatcher."""
        if isinstance(answer, JobRunningAnswer):
            if answer.progress is not None:
                with contextlib.suppress(*OUTAGE_ERRORS):  # the next one says more
                    await self._parts.control.progress(self._delivery, answer.progress)
        else:
            self._remote_id = answer.remote_id
        if self._held.lease.state is Permit.DETACHED:
            return
        await self._parts.store.retry_until_available(self._detach)
        if self._remote_id != self._delivery.task.id:
            await self._note(accepted_note(self._remote_id))

    async def _detach(self) -> None:
        held = self._held
        (lease,) = await self._parts.pool.detach(
            held.lease, ttl=max(0.0, self._remaining) + _MARGIN
        )
        if lease is None:
            held.lost.set()
        else:
            self._parts.renewer.change(held, lease)

    async def _leave(self) -> None:
        """Let the job run on without this dispatcher: its slot stays the job's, for who gets the job next."""
        try:
            async with asyncio.timeout(_FINAL_SECONDS):
                await self._detach()
        except (TaskQueueError, TimeoutError):
            _log.warning("could not release a slot; it is free again when its lease expires")
        self._parts.renewer.drop(self._held)

    async def _give_up(self, answer: Answer) -> None:
        """Hand back as lost what has run, or may have, and could not be settled: who gets it next asks for it."""
        if isinstance(answer, Busy) or (
            isinstance(answer, EndpointUnreachable) and not answer.sent
        ):
            return
        with contextlib.suppress(TaskQueueError, TimeoutError):
            async with asyncio.timeout(_FINAL_SECONDS):
                await self._ends.subscription.redeliver(self._delivery, lost=True)

    @property
    def _asks(self) -> bool:
        return self._config.poll_endpoint_template is not None

    @property
    def _remaining(self) -> float:
        return self._until - time.monotonic()

    # To its end.

    async def _after(self, answer: Answer) -> None:
        """Let the server feel how it did."""
        parts, model, server = self._parts, self._held.lease.model, self._held.lease.server
        rest: float | None = None
        match answer:
            case Done():
                parts.breaker.passed(model, server)
            case Busy(retry_after):
                rest = parts.settings.busy_rest if retry_after is None else retry_after
                if self._allowed:
                    parts.breaker.undecided(model, server)
            case EndpointUnreachable() | JobFailedAnswer(final=False):
                rest = parts.breaker.failed(model, server)
                parts.renewer.poke(model, server)
        if rest:
            await parts.store.retry_until_available(partial(parts.pool.rest, model, server, rest))
            self._ends.look_in(rest)

    async def _conclude(self, answer: Answer) -> None:
        task = self._delivery.task
        match answer:
            case Done(result):
                late = task.deadline is not None and task.deadline <= self._parts.backend.now()
                if not late:
                    await self._parts.report(task, "done", result, None)
                results = await self._ends.settlements.ack([(self._delivery, result)])
                if not results[self._delivery.receipt]:
                    await self._note(result)  # the job is not this dispatcher's any more
                elif late:  # it might have expired meanwhile; if this is not told, who watches the deadline does it
                    await self._parts.report(task, "done", result, None)
            case EndpointUnreachable(sent=True):
                await self._settle(Redeliver(lost=True))
            case JobFailedAnswer(error, final):
                outcome = Rejected(_REFUSED, error) if final else retry.Failed(error)
                policy = RetryPolicy(max_attempts=self._config.max_retries + 1)
                await self._settle(
                    retry.decide(outcome, self._delivery, policy, self._parts.uniform)
                )
            case _:
                await self._ends.settlements.redeliver([self._delivery])

    async def _settle(self, verb: Verb) -> None:
        parts, task = self._parts, self._delivery.task
        if isinstance(verb, Bury):  # told first: to tell twice is better than not at all
            await parts.report(task, "failed", None, verb.error or verb.reason)
        settled = await parts.store.retry_until_available(
            partial(settle, parts.backend, self._ends.subscription, self._delivery, verb)
        )
        if settled is Settled.DEAD and isinstance(verb, Redeliver):
            await parts.report(task, "failed", None, _LOST)

    async def _note(self, note: bytes) -> None:
        """Leave a note at the slot: for who has the job next, or put aside where the slot is not the job's any more."""
        lease, job = self._held.lease, self._delivery.task.id
        leave = partial(self._parts.pool.leave, lease.model, job, lease.token, note)
        await self._parts.store.retry_until_available(leave)


def _unheard(answer: Answer) -> Answer:
    """Return what an answer to a question means: a server that is away, or too busy to answer, may have the job."""
    if isinstance(answer, Busy):
        return JobRunningAnswer()
    if isinstance(answer, EndpointUnreachable):
        return EndpointUnreachable(answer.error, sent=True)
    return answer

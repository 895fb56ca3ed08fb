"""A job on the servers: where it was sent, and under which id its server knows it."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from msgspec import structs

from taskqueue_core.capabilities import EndpointInfo
from taskqueue_core.tasks import Delivery
from taskqueue_dispatch.endpoint_client.answers import (
    Answer,
    Busy,
    Done,
    EndpointUnreachable,
    JobAcceptedAnswer,
    JobRunningAnswer,
    Missing,
)
from taskqueue_dispatch.endpoint_client.exchange import NotReachedError
from taskqueue_dispatch.job_events import JobEvents
from taskqueue_dispatch.job_notes import answer_of, push_token, sent_before, sent_note
from taskqueue_dispatch.lease_renewal import RenewedLease
from taskqueue_dispatch.models import ModelConfig
from taskqueue_dispatch.runner_context import RunnerContext

_MAX_SERVERS_ASKED = 16
"""maximum number of servers that are polled for a job that may have been sent before"""


class RemoteJob:
    """A job that this attempt, or an earlier one, may have sent to a server."""

    def __init__(
        self,
        delivery: Delivery,
        held: RenewedLease,
        config: ModelConfig,
        context: RunnerContext,
    ) -> None:
        self.remote_id = delivery.task.id
        """the server's id for the job"""
        self.sent = held.lease.resumed
        """whether a server may have received the job"""
        self.begun_at: float | None = None
        """monotonic time at which this attempt sent the job or found it on a server"""
        self.events = JobEvents(context.events, delivery)
        self._url = held.lease.url
        self._delivery = delivery
        self._held = held
        self._config = config
        self._context = context

    @property
    def asks(self) -> bool:
        """Whether servers can be polled for the job."""
        return self._config.poll_endpoint_template is not None

    @property
    def reports(self) -> bool:
        """Whether the server reports its jobs, so that the slot ends when the server no longer runs the job."""
        server = self._held.lease.server
        return any(
            info.endpoint.reports and info.endpoint.server == server for info in self._endpoints
        )

    @property
    def silence(self) -> float:
        """Number of seconds for which the server has answered no health check."""
        return self._context.renewer.checks.silence(self._name)

    @property
    def note(self) -> bytes:
        """A note that says where the job was sent."""
        return sent_note(self._delivery, self.remote_id, self._url)

    async def send(self) -> Answer:
        """Send the job to the server of its slot."""
        context, lease, task = self._context, self._held.lease, self._delivery.task
        token = push_token(context.registry.secrets[0], task.id, lease.token)
        return await context.caller.send(
            structs.replace(lease, token=token),
            task,
            self._config,
            attempt=self._delivery.attempt,
            limited=not self.reports,
            ready=self._confirm_slot,
            streamed=self.events.put,
        )

    async def _confirm_slot(self) -> None:
        """Make sure that the slot is held when the job is about to be sent. Raises `NotReachedError` if it is lost."""
        if not await self._keep_slot():
            raise NotReachedError("the slot was lost before the job was sent")
        self.begin()

    def begin(self) -> None:
        """Record that the job is on a server from now on."""
        self.sent, self.begun_at = True, time.monotonic()

    async def _keep_slot(self) -> bool:
        """Keep the slot of a job that is not sent yet. Return False if it is lost.

        A slot ends when two reports, ``settled`` seconds apart, lack the job. After half that time, assign it again.
        """
        held, settings = self._held, self._context.settings
        while time.monotonic() - held.assigned_at > settings.settled / 2:
            begun, pair = time.monotonic(), (held.lease, self._delivery.task.id)
            assign = partial(self._context.pool.assign, pair, ttl=settings.lease)
            (lease,) = await self._context.store.retry_until_available(assign)
            if lease is None:
                held.lost.set()
                return False
            self._context.renewer.change(held, lease)
            held.assigned_at = begun
        return True

    async def refused(self, retry_after: float | None) -> bool:
        """Note that the server is busy. Return whether no other job, of any dispatcher, has a slot of the endpoint."""
        model, server = self._name
        if not self._context.limits.refused(model, server, retry_after):
            return False
        inspect = partial(self._context.pool.inspect, model)
        infos = (await self._context.store.retry_until_available(inspect)).endpoints
        held = [each.assigned + each.detached for each in infos if each.endpoint.server == server]
        return sum(held) <= 1

    def check_soon(self) -> None:
        """Check the server's health as soon as possible."""
        self._context.renewer.checks.check_soon(*self._name)

    async def ask(self) -> Answer:
        """Poll the server for the job."""
        return await self._ask(self._url)

    async def cancel(self) -> None:
        """Ask the server to cancel the job, if servers can be polled. Only a later poll shows whether it did so."""
        if self.asks:
            await self._context.caller.cancel(self._url, self.remote_id, self._config)

    async def find(self) -> Answer | None:
        """Return the state of a job that was sent earlier, or ``None`` if the job must be sent."""
        lease, delivery = self._held.lease, self._delivery
        noted = None if lease.note is None else answer_of(lease.note)
        if isinstance(noted, JobAcceptedAnswer):
            self.remote_id = noted.remote_id
        if noted is not None and not (self.asks and isinstance(noted, JobAcceptedAnswer)):
            return noted
        if lease.resumed and not self.asks and await self._runs():
            return EndpointUnreachable("an earlier attempt runs on the server", sent=True)
        if not self.asks or not (delivery.losses or delivery.attempt > 1 or lease.resumed):
            return None
        if lease.resumed:
            if noted is None:
                late = await self._context.pool.late(lease.model, delivery.task.id)
                sent = sent_before(delivery, late)
                if sent is not None and sent.url in self._urls:
                    self._url, self.remote_id = sent.url, sent.accepted
            result = polled(await self.ask())
            if not isinstance(result, Missing):
                return result
            self._url, self.remote_id = lease.url, delivery.task.id
        return await self._ask_all()

    async def _runs(self) -> bool:
        """Return whether the server, which cannot be polled, may still run the job according to its health report."""
        info = next((info for info in self._endpoints if info.endpoint.url == self._url), None)
        if info is None or not info.endpoint.reports:
            return False
        seen = await self._context.caller.health(info.endpoint, self._config)
        if seen is not None and seen.jobs is not None:
            return self._delivery.task.id in seen.jobs
        # A job with late notes may have been on another server.
        late = await self._context.pool.late(self._held.lease.model, self._delivery.task.id)
        return not late and (seen is None or seen.active > 0)

    async def _ask_all(self) -> Answer | None:
        """Poll all servers for a job that may have been sent before. Return ``None`` if none of them has it.

        After a loss, healthy servers whose answers are of no use are asked again, because one of them may have the job.
        """
        urls = self._urls[:_MAX_SERVERS_ASKED]
        end = time.monotonic() + self._context.settings.partition
        while True:
            answers = await asyncio.gather(*map(self._ask, urls))
            for url, answer in zip(urls, answers, strict=True):
                if isinstance(answer, Done | JobRunningAnswer):
                    self._url = url
                    return answer
            healthy = {info.endpoint.url for info in self._endpoints if info.healthy}
            urls = [
                url
                for url, answer in zip(urls, answers, strict=True)
                if url in healthy and isinstance(answer, Busy | EndpointUnreachable)
            ]
            if not urls or not self._delivery.losses or time.monotonic() >= end:
                return None
            await asyncio.sleep(self._config.poll_interval)
            if not await self._keep_slot():
                return EndpointUnreachable("the slot was lost before the job was sent", sent=False)

    async def _ask(self, url: str) -> Answer:
        return await self._context.caller.ask(url, self.remote_id, self._config)

    @property
    def _name(self) -> tuple[str, str]:
        return self._held.lease.model, self._held.lease.server

    @property
    def _endpoints(self) -> tuple[EndpointInfo, ...]:
        view = self._context.registry.view(self._held.lease.model)
        return () if view is None else view.endpoints

    @property
    def _urls(self) -> list[str]:
        known = (info.endpoint.url for info in self._endpoints)
        return list(dict.fromkeys([self._held.lease.url, *known]))


def polled(answer: Answer) -> Answer:
    """Return what the answer to a poll means: a server that is unreachable or busy may still have the job."""
    if isinstance(answer, Busy):
        return JobRunningAnswer()
    if isinstance(answer, EndpointUnreachable):
        return EndpointUnreachable(answer.error, sent=True)
    return answer

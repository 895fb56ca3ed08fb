"""The dispatcher, which connects the registry, the slots, the runners and the callbacks of one backend."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Self

from msgspec import structs

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import dead_letters_of
from taskqueue_core.config import load_settings
from taskqueue_core.consumer.event_queue import EventQueue
from taskqueue_core.consumer.maintenance import run_maintenance
from taskqueue_core.consumer.outage import OUTAGE_BACKOFF, OutageRetry
from taskqueue_core.errors import TaskQueueError
from taskqueue_core.tasks import Published, Task, new_id
from taskqueue_dispatch.callbacks.sender import Sender
from taskqueue_dispatch.callbacks.tasks import callback_id, callback_task, expiry_task
from taskqueue_dispatch.config import DispatchSettings
from taskqueue_dispatch.endpoint_client.client import EndpointClient
from taskqueue_dispatch.jobs import Submission, callback_url_of, task_of
from taskqueue_dispatch.model_runner import ModelRunner
from taskqueue_dispatch.names import CALLBACKS
from taskqueue_dispatch.runner_context import RunnerContext
from taskqueue_dispatch.slot_finder import SlotFinder
from taskqueue_dispatch.status import Jobs
from taskqueue_dispatch.submit import Leased, NoSlots, Queued, Submitter

_log = logging.getLogger("taskqueue.dispatch")


class Dispatcher(RunnerContext):
    """An async context manager that sends the jobs of every registered model to the model's servers while it is open.

    Any number of dispatchers may share one backend. The caller owns the backend.
    """

    def __init__(
        self,
        backend: Backend,
        settings: DispatchSettings | None = None,
        *,
        caller: EndpointClient | None = None,
        maintenance: bool = True,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        """Create a dispatcher without any I/O. Pass ``maintenance=False`` if another component maintains the backend.

        Raises `CapabilityMissing` if the backend lacks ``slots``, ``control`` or ``dead_letters``.
        """
        settings = settings or load_settings(DispatchSettings)
        caller = caller or EndpointClient(settings, tls_ca=settings.tls_ca)
        super().__init__(backend, settings, caller, OutageRetry(_log_outage), uniform)
        self.dead_letters = dead_letters_of(backend)
        self.sender = Sender(backend, settings)
        self.submitter = Submitter(
            backend, self.registry, self.estimates, check_callback=self.sender.check
        )
        self.finder = SlotFinder(
            self.pool, self.registry, self.renewer, self.waiters, settings, holder=self.holder
        )
        self.jobs = Jobs(backend, self.registry)
        self._maintenance = maintenance
        self._runners: dict[str, tuple[ModelRunner, asyncio.Task[None]]] = {}
        self._loops: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self.registry.listen(self._changed.set)

    @property
    def running(self) -> dict[str, int]:
        """Return the number of jobs that this dispatcher is running on servers, by model."""
        return {model: runner.running for model, (runner, _) in self._runners.items()}

    async def submit(self, submission: Submission) -> Leased | Queued | NoSlots:
        """Store a job, or return the reason why it is refused: see `taskqueue_dispatch.submit.Submitter.submit`."""
        reports_expiry = submission.callback_url is not None and submission.deadline is not None
        if reports_expiry and submission.idempotency_key is None:
            submission = structs.replace(submission, idempotency_key=new_id())
        outcome = await self.submitter.submit(submission)
        if reports_expiry and not isinstance(outcome, NoSlots):
            # If this call fails, the client gets no confirmation. If it submits the job again, this call is repeated.
            await self._publish(expiry_task(task_of(submission)))
        return outcome

    async def __aenter__(self) -> Self:
        """Start dispatching jobs. If the store is unavailable, wait for it."""
        loops: list[Coroutine[Any, Any, None]] = [
            self._run_loop(), self.renewer.run(), self.sender.run()
        ]  # fmt: skip
        if self.events is not None:
            loops.append(_store_events(self.events))
        if self._maintenance:
            loops.append(run_maintenance(self.backend))
        await self._refresh()
        self._loops = [asyncio.create_task(loop) for loop in loops]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self, seconds: float | None = None) -> None:
        """Stop receiving jobs, wait up to ``seconds`` (default: ``drain``) for running jobs, and release the rest.

        Released jobs continue on their servers; another dispatcher takes them over together with their slots.
        Idempotent. If this call is cancelled, it stops waiting for jobs.
        """
        if not self._loops:
            return
        model_loop, *others = self._loops
        self._loops = []
        try:
            await _cancel(model_loop)
            wait = self.settings.drain if seconds is None else seconds
            await asyncio.gather(*(self._stop(*each, wait) for each in self._runners.values()))
        finally:
            runners, self._runners = self._runners, {}
            await _cancel(*(task for _, task in runners.values()))
            await self.finder.aclose()
            await _cancel(*others)
            await self.caller.aclose()

    async def _run_loop(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.settings.safety_pass):
                    await self._changed.wait()
            self._changed.clear()
            await self._refresh()

    async def _refresh(self) -> None:
        try:
            before = self.registry.epoch
            await self.store.retry_until_available(self.registry.refresh)
            # After the store was emptied, running jobs must get their slots back before new slots are granted.
            if self.registry.epoch != before:
                await self.renewer.renew()
            known = {view.model for view in self.registry.known()}
            for model in known - self._runners.keys():
                runner = ModelRunner(model, self)
                self._runners[model] = runner, asyncio.create_task(runner.run())
            for model in self._runners.keys() - known:
                await self._stop(*self._runners[model], 0)
                del self._runners[model]
        except TaskQueueError as error:
            _log.warning("could not read the registry", extra={"code": error.code})

    async def _stop(self, runner: ModelRunner, task: asyncio.Task[None], seconds: float) -> None:
        runner.stop(seconds)
        try:
            await asyncio.wait([task])
        finally:
            await _cancel(task)

    async def report(
        self, task: Task, status: str, result: bytes | None, error: str | None
    ) -> None:
        """If a job has a callback URL, store the callback that reports its end, and cancel its expiry callback."""
        if callback_url_of(task) is None:
            return
        await self._publish(callback_task(task, status, result, error))
        if task.deadline is not None:
            cancel = partial(self.control.cancel, CALLBACKS, callback_id(task.id, "expired"))
            await self.store.retry_until_available(cancel)

    async def _publish(self, callback: Task) -> None:
        """Store a callback. Retry while its queue refuses it, because the client gets no other notification."""
        for tries in itertools.count(1):
            publish = partial(self.backend.publisher.publish, callback)
            (confirmation,) = await self.store.retry_until_available(publish)
            if confirmation.status is not Published.REFUSED:
                return
            await asyncio.sleep(OUTAGE_BACKOFF.delay(tries))


async def _store_events(events: EventQueue) -> None:
    """Append the events of jobs until cancelled. Jobs do not wait for events that the store refuses."""
    while True:
        try:
            await events.run()
        except Exception:  # noqa: BLE001 - no error may keep jobs from being settled
            _log.exception("could not store events of jobs")
            events.clear()


async def _log_outage(ok: bool, reason: str) -> None:  # noqa: FBT001 - `OutageRetry` passes this argument by position
    if ok:
        _log.info("store available again")
    else:
        _log.warning("store unavailable: %s; retrying", reason)


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

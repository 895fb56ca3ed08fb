"""Submission of jobs: a job is stored before the answer is `Leased` or `Queued`; with `NoSlots` it is not stored."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from enum import StrEnum

import msgspec

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import EndpointInfo, PoolView, control_of, slots_of
from taskqueue_core.confirmations import stored
from taskqueue_core.errors import InvalidInput, PublishUnconfirmed
from taskqueue_core.queue import Queue
from taskqueue_core.tasks import Confirmation, Published, Refusal, State, Task, TaskStatus
from taskqueue_dispatch.jobs import Submission, task_of
from taskqueue_dispatch.models import ModelConfig, WhenDown
from taskqueue_dispatch.registry import ModelRegistry, ModelView
from taskqueue_dispatch.status import JOB_STATES, JobState

_WEIGHT = 0.1
"""weight of the newest duration in the moving average"""
_MAX_MODELS = 10_000
_RETRY_SECONDS = 10.0
"""seconds after which to retry if there is no better estimate"""
_MIN_RETRY_SECONDS = 1.0


class Reason(StrEnum):
    """The reason why a job was refused."""

    NO_ENDPOINTS = "no_endpoints"
    """the model has no slots, or only slots of draining or removed endpoints"""
    NO_HEALTHY_ENDPOINT = "no_healthy_endpoint"
    """no endpoint is healthy, and the model's configuration refuses jobs in this case"""
    QUEUE_FULL = "queue_full"
    TENANT_FULL = "tenant_full"
    INTAKE_PAUSED = "intake_paused"
    STORE_FULL = "store_full"


class Leased(msgspec.Struct, frozen=True):
    """The answer for a job that is stored and need not wait: a slot is free for it, or it has started or ended."""

    job_id: str
    server: str | None = None
    """server that runs the job, if the job is running and the server is known"""
    state: JobState = JobState.RUNNING
    """state of the job; a final state if the job was submitted before and has ended"""


class Queued(msgspec.Struct, frozen=True):
    """The answer for a job that is stored and waits."""

    job_id: str
    position: int
    """number of the model's waiting jobs before this job, or an upper bound if the store does not report the number"""
    estimated_wait: float | None
    """estimated seconds until the job starts, or ``None`` if there is no estimate"""


class NoSlots(msgspec.Struct, frozen=True):
    """The answer for a job that was refused and not stored."""

    reason: Reason
    detail: str
    retry_after: float
    """seconds after which to try again"""


NO_ENDPOINTS = NoSlots(Reason.NO_ENDPOINTS, "the model has no endpoint with slots", _RETRY_SECONDS)
NO_HEALTHY_ENDPOINT = NoSlots(
    Reason.NO_HEALTHY_ENDPOINT, "no endpoint of the model is healthy", _RETRY_SECONDS
)


class Estimates:
    """The average duration of each model's jobs, as an exponential moving average."""

    def __init__(self) -> None:
        self._means: OrderedDict[str, float] = OrderedDict()

    def note(self, model: str, seconds: float) -> None:
        """Record how long a job took. Averages are kept for the 10,000 models whose jobs were recorded last."""
        mean = self._means.get(model, seconds)
        self._means[model] = mean + _WEIGHT * (seconds - mean)
        self._means.move_to_end(model)
        if len(self._means) > _MAX_MODELS:
            self._means.popitem(last=False)

    def wait(self, model: str, position: int, slots: int) -> float | None:
        """Return the estimated seconds until a job starts if ``position`` jobs wait before it and no slot is free."""
        mean = self._means.get(model)
        return None if mean is None or slots < 1 else mean * (position + 1) / slots


class Submitter:
    """The component that stores new jobs. Safe for concurrent use, in any number of replicas."""

    def __init__(
        self,
        backend: Backend,
        registry: ModelRegistry,
        estimates: Estimates,
        *,
        check_callback: Callable[[str], Awaitable[object]] | None = None,
    ) -> None:
        """Create a submitter without any I/O.

        ``check_callback`` raises `InvalidInput` for a forbidden URL. Without it, all callback URLs are refused.
        """
        self._backend = backend
        self._queue = Queue(backend)
        self._pool = slots_of(backend)
        self._control = control_of(backend)
        self._registry = registry
        self._estimates = estimates
        self._check_callback = check_callback

    async def submit(self, submission: Submission) -> Leased | Queued | NoSlots:
        """Store a job, and return whether it can run at once, or why it was refused.

        Jobs with the same model, tenant and idempotency key are stored only once.

        Raises `InvalidInput`, `IdConflict` if the key belongs to a job with another payload, and `QueueFull` if the
        queue has been replaced (its setting ``moved_to``). After `BackendUnavailable` or `PublishUnconfirmed`, it is
        unknown whether the job was stored: submit it again with the same key.
        """
        task = task_of(submission)
        if submission.callback_url is not None:
            if self._check_callback is None:
                raise InvalidInput(
                    "callback_url", "a URL", "no URL, because callbacks are disabled"
                )
            await self._check_callback(submission.callback_url)
        model = submission.model
        current = await self._read_current(model)
        refused = _refused(current)
        if refused is not None:
            known = None if submission.idempotency_key is None else await self._status(task)
            return (
                refused if known is None else await self._stored_before(model, task, known, current)
            )
        (confirmation,) = await self._queue.publish_many([task])
        if confirmation.status is Published.DUPLICATE:
            known = await self._status(task)
            # Publishing found the job's first submission, but its record may have expired since then.
            if known is None:
                raise PublishUnconfirmed(
                    "the record of the job has expired; submit the job again", task_id=task.id
                )
            return await self._stored_before(model, task, known, current)
        if confirmation.status is Published.REFUSED and confirmation.code in _REASONS:
            return self._refusal(confirmation, model, current)
        stored(confirmation)
        position = confirmation.position
        if position is None:
            position = max(0, (await self._control.stats(task.key)).ledger.waiting - 1)
        scheduled = task.not_before is not None and task.not_before > self._backend.now()
        if position < current.open and not scheduled:
            return Leased(task.id)
        return self._queued(task, model, position, current)

    async def _read_current(self, model: str) -> _Current:
        view = self._registry.view(model)
        config = await self._registry.config(model) if view is None else view.config
        pool = await self._pool.inspect(model)
        if any(info.endpoint.together for info in pool.endpoints):
            pool = await self._pool.inspect()
        return _current_of(pool, model, config, self._backend.now())

    async def _status(self, task: Task) -> TaskStatus | None:
        (status,) = await self._control.statuses(task.key, task.id)
        return status

    async def _stored_before(
        self, model: str, task: Task, status: TaskStatus, current: _Current
    ) -> Leased | Queued:
        """Return the answer for a job that was stored earlier, based on its current state."""
        if status.state in {State.WAITING, State.SCHEDULED}:
            waiting = (await self._control.stats(task.key)).ledger.waiting
            return self._queued(task, model, max(0, waiting - 1), current)
        return Leased(task.id, current.servers.get(task.id), JOB_STATES[status.state])

    def _queued(self, task: Task, model: str, position: int, current: _Current) -> Queued:
        wait = self._estimates.wait(model, position, current.slots)
        if task.not_before is not None:
            wait = max(wait or 0.0, task.not_before - self._backend.now())
        return Queued(task.id, position, wait)

    def _refusal(self, confirmation: Confirmation, model: str, current: _Current) -> NoSlots:
        hint = confirmation.retry_after
        if hint is None:
            hint = self._estimates.wait(model, 0, current.slots) or _RETRY_SECONDS
        reason = Reason(confirmation.code or Refusal.QUEUE_FULL)
        return NoSlots(reason, confirmation.reason or reason.value, max(_MIN_RETRY_SECONDS, hint))


_REASONS = {
    Refusal.QUEUE_FULL,
    Refusal.TENANT_FULL,
    Refusal.INTAKE_PAUSED,
    Refusal.STORE_FULL,
}


class _Current(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of a model and its slots."""

    config: ModelConfig
    slots: int
    usable: bool
    open: int
    """number of slots that are free, or held for the next job"""
    servers: dict[str, str]
    """name of the server of each running job, by job id"""


def _current_of(pool: PoolView, model: str, config: ModelConfig, now: float) -> _Current:
    endpoints = tuple(info for info in pool.endpoints if info.endpoint.model == model)
    view = ModelView(model=model, key="", config=config, endpoints=endpoints)
    held: dict[str, int] = {}
    for info in pool.endpoints:
        held[info.endpoint.server] = held.get(info.endpoint.server, 0) + info.held
    return _Current(
        config=config,
        slots=view.slots,
        usable=view.usable,
        open=sum(_open(info, held[info.endpoint.server], now) for info in endpoints),
        servers={
            lease.job: lease.server
            for lease in pool.leases
            if lease.job is not None and lease.model == model
        },
    )


def _open(info: EndpointInfo, held: int, now: float) -> int:
    if not info.usable or (info.resting_until is not None and info.resting_until > now):
        return 0
    together = info.endpoint.together
    room = info.free if together is None else min(info.free, max(0, together - held))
    return room + info.unassigned


def _refused(current: _Current) -> NoSlots | None:
    """Return the reason why new jobs are refused before they reach the queue, or ``None`` if they are not."""
    if not current.slots:
        return NO_ENDPOINTS
    if not current.usable and current.config.when_down is WhenDown.REFUSE:
        return NO_HEALTHY_ENDPOINT
    if not current.config.capacity(current.slots) and not current.open:
        return NoSlots(
            Reason.QUEUE_FULL, "no slot is free, and waiting is disabled", _MIN_RETRY_SECONDS
        )
    return None

"""Submit: a job is stored before anything is said, and the answer is one of three."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from enum import StrEnum

import msgspec

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import EndpointInfo, PoolView, control_of, slots_of
from taskqueue_core.errors import InvalidInput, PublishUnconfirmed
from taskqueue_core.queue import Queue, stored
from taskqueue_core.tasks import Confirmation, Published, Refusal, State, Task, TaskStatus
from taskqueue_dispatch.jobs import Submission, task_of
from taskqueue_dispatch.models import ModelConfig, WhenDown
from taskqueue_dispatch.registry import ModelRegistry, ModelView
from taskqueue_dispatch.status import JobState, state_of

_NEWEST = 0.1
"""the weight of one duration in the average"""
_MODELS = 10_000
_LATER = 10.0
"""seconds after which to come again where nothing tells"""
_SHORTEST = 1.0


class Reason(StrEnum):
    """Why a job was not taken."""

    NO_ENDPOINTS = "no_endpoints"
    """the model has no slots registered"""
    NO_HEALTHY_ENDPOINT = "no_healthy_endpoint"
    """none of them is well, and the model's configuration refuses jobs meanwhile"""
    QUEUE_FULL = "queue_full"
    TENANT_FULL = "tenant_full"
    INTAKE_PAUSED = "intake_paused"
    STORE_FULL = "store_full"


class Leased(msgspec.Struct, frozen=True):
    """The job is stored, and a slot is there for it."""

    job_id: str
    server: str | None = None
    """where it runs, if it does already and that is known"""
    state: JobState = JobState.RUNNING
    """another one where it was submitted before, and has ended"""


class Queued(msgspec.Struct, frozen=True):
    """The job is stored, and waits."""

    job_id: str
    position: int
    """how many jobs of the model wait before it; of one that was submitted before, at most"""
    estimated_wait: float | None
    """seconds, where the durations of such jobs are known"""


class NoSlots(msgspec.Struct, frozen=True):
    """Nothing was stored."""

    reason: Reason
    detail: str
    retry_after: float
    """seconds after which it is worth another try"""


class Estimates:
    """How long jobs take, by model: a moving average, in which each has a tenth of the weight of those before."""

    def __init__(self) -> None:
        """Start without any."""
        self._means: OrderedDict[str, float] = OrderedDict()

    def note(self, model: str, seconds: float) -> None:
        """Note how long a job took. The models that were noted longest ago are forgotten beyond 10,000."""
        mean = self._means.get(model, seconds)
        self._means[model] = mean + _NEWEST * (seconds - mean)
        self._means.move_to_end(model)
        if len(self._means) > _MODELS:
            self._means.popitem(last=False)

    def wait(self, model: str, position: int, slots: int) -> float | None:
        """Return the seconds until a job begins before which ``position`` others wait, with all slots in use."""
        mean = self._means.get(model)
        return None if mean is None or slots < 1 else mean * (position + 1) / slots


class Submitter:
    """Takes jobs in. Safe for concurrent use; any number of replicas."""

    def __init__(
        self,
        backend: Backend,
        registry: ModelRegistry,
        estimates: Estimates,
        *,
        check_callback: Callable[[str], Awaitable[object]] | None = None,
    ) -> None:
        """``check_callback`` raises `InvalidInput` for a URL that is not to be called; without it none is taken."""
        self._backend = backend
        self._queue = Queue(backend)
        self._pool = slots_of(backend)
        self._control = control_of(backend)
        self._registry = registry
        self._estimates = estimates
        self._check_callback = check_callback

    async def submit(self, submission: Submission) -> Leased | Queued | NoSlots:
        """Store a job, and say whether it can run at once. Idempotent by its key: it is stored once.

        Raises `InvalidInput`, `IdConflict` for a key that belongs to a job with another payload, `QueueFull` for a
        queue that is closed for good, and `BackendUnavailable` or `PublishUnconfirmed` where it is not known whether
        the job was stored: submit it again with the same key.
        """
        task = task_of(submission)
        if submission.callback_url is not None:
            await self._check(submission.callback_url)
        model = submission.model
        glance = await self._glance(model)
        refused = _refused(glance)
        if refused is not None:
            known = None if submission.idempotency_key is None else await self._status(task)
            return refused if known is None else await self._before(model, task, known, glance)
        (confirmation,) = await self._queue.publish_many([task])
        if confirmation.status is Published.DUPLICATE:
            known = await self._status(task)
            if known is None:  # it was forgotten just then
                raise PublishUnconfirmed(
                    "the record of the job has expired; submit it again", task_id=task.id
                )
            return await self._before(model, task, known, glance)
        if confirmation.status is Published.REFUSED and confirmation.code in _REASONS:
            return self._no_room(confirmation, model, glance)
        stored(confirmation)
        position = confirmation.position
        if position is None:
            position = max(0, (await self._control.stats(task.key)).ledger.waiting - 1)
        later = task.not_before is not None and task.not_before > self._backend.now()
        if position < glance.open and not later:
            return Leased(task.id)
        return self._queued(task, model, position, glance)

    async def _check(self, url: str) -> None:
        if self._check_callback is None:
            raise InvalidInput("callback_url", "a URL", "none: callbacks are disabled")
        await self._check_callback(url)

    async def _glance(self, model: str) -> _Glance:
        view = self._registry.view(model)
        config = await self._registry.config(model) if view is None else view.config
        pool = await self._pool.inspect(model)
        if any(info.endpoint.together for info in pool.endpoints):
            pool = await self._pool.inspect()
        return _glance_of(pool, model, config, self._backend.now())

    async def _status(self, task: Task) -> TaskStatus | None:
        (status,) = await self._control.statuses(task.key, task.id)
        return status

    async def _before(
        self, model: str, task: Task, status: TaskStatus, glance: _Glance
    ) -> Leased | Queued:
        """Answer for a job that is stored already, by its present state."""
        if status.state in {State.WAITING, State.SCHEDULED}:
            waiting = (await self._control.stats(task.key)).ledger.waiting
            return self._queued(task, model, max(0, waiting - 1), glance)
        return Leased(task.id, glance.servers.get(task.id), state_of(status.state))

    def _queued(self, task: Task, model: str, position: int, glance: _Glance) -> Queued:
        wait = self._estimates.wait(model, position, glance.slots)
        if task.not_before is not None:
            wait = max(wait or 0.0, task.not_before - self._backend.now())
        return Queued(task.id, position, wait)

    def _no_room(self, confirmation: Confirmation, model: str, glance: _Glance) -> NoSlots:
        hint = confirmation.retry_after
        if hint is None:
            hint = self._estimates.wait(model, 0, glance.slots) or _LATER
        reason = Reason(confirmation.code or Refusal.QUEUE_FULL)
        return NoSlots(reason, confirmation.reason or reason.value, max(_SHORTEST, hint))


_REASONS = {
    Refusal.QUEUE_FULL,
    Refusal.TENANT_FULL,
    Refusal.INTAKE_PAUSED,
    Refusal.STORE_FULL,
}


class _Glance(msgspec.Struct, frozen=True, kw_only=True):
    """A model as it is now."""

    config: ModelConfig
    slots: int
    usable: bool
    open: int
    """slots that are free, or in hand for a job that comes"""
    servers: dict[str, str]
    """where jobs run"""


def _glance_of(pool: PoolView, model: str, config: ModelConfig, now: float) -> _Glance:
    endpoints = tuple(info for info in pool.endpoints if info.endpoint.model == model)
    view = ModelView(model=model, key="", config=config, endpoints=endpoints)
    held: dict[str, int] = {}
    for info in pool.endpoints:
        held[info.endpoint.server] = held.get(info.endpoint.server, 0) + info.held
    return _Glance(
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


def _refused(glance: _Glance) -> NoSlots | None:
    """Return why jobs are refused before their queue is asked."""
    if not glance.slots:
        return NoSlots(Reason.NO_ENDPOINTS, "the model has no endpoint with slots", _LATER)
    if not glance.usable and glance.config.when_down is WhenDown.REFUSE:
        return NoSlots(Reason.NO_HEALTHY_ENDPOINT, "no endpoint of the model is healthy", _LATER)
    if not glance.config.capacity(glance.slots) and not glance.open:
        return NoSlots(Reason.QUEUE_FULL, "no slot is free, and waiting is disabled", _SHORTEST)
    return None

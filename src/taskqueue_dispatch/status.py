"""The status, result and cancellation of jobs by id, whatever their model, and the dead letters of all models."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import control_of, dead_letters_of, slots_of
from taskqueue_core.limits import check_name, check_number
from taskqueue_core.tasks import DeadLetter, State, TaskStatus
from taskqueue_dispatch.jobs import model_of_queue
from taskqueue_dispatch.names import JOBS, mark_of, queue_of
from taskqueue_dispatch.registry import ModelRegistry

_CUT = "~"
_MOST = 1000


class JobState(StrEnum):
    """The state of a job, as clients see it."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


JOB_STATES = {
    State.SCHEDULED: JobState.QUEUED,
    State.WAITING: JobState.QUEUED,
    State.IN_FLIGHT: JobState.RUNNING,
    State.DONE: JobState.DONE,
    State.DEAD: JobState.FAILED,
    State.DISCARDED: JobState.FAILED,
    State.EXPIRED: JobState.EXPIRED,
    State.CANCELLED: JobState.CANCELLED,
}
"""the state of a job by the state of its task"""


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of one job."""

    job_id: str
    model: str | None
    """``None`` if it cannot be determined: the model is not registered, and its queue has a shortened name"""
    state: JobState
    attempt: int
    losses: int
    updated_at: float
    """Unix seconds of the last change, by the store's clock"""
    progress: float | str | None = None
    server: str | None = None
    """name of the server that runs the job, if known"""
    reason: str | None = None
    """reason why the job has failed permanently, such as ``max_retries_exceeded``"""
    error: str | None = None
    """error of the last failed attempt"""


class Jobs:
    """The jobs of all models. Methods raise `InvalidInput` for an invalid id, and `BackendUnavailable`."""

    def __init__(self, backend: Backend, registry: ModelRegistry) -> None:
        """Create the object without any I/O. Raises `CapabilityMissing` if the backend lacks a needed capability."""
        self._control = control_of(backend)
        self._dead_letters = dead_letters_of(backend)
        self._pool = slots_of(backend)
        self._registry = registry

    async def status(self, job_id: str) -> JobStatus | None:
        """Return the status of a job, or ``None`` if it is unknown or its record has expired."""
        matches = await self.find(job_id)
        if matches is None:
            return None
        key, status = matches
        reason, error = None, status.error
        if status.state is State.DEAD and (
            dead_letter := await self._dead_letters.get(key, job_id)
        ):
            reason = dead_letter.reason
            error = dead_letter.history[-1].error if dead_letter.history else status.error
        model = self.model_of(key)
        running = status.state is State.IN_FLIGHT and model is not None
        return JobStatus(
            job_id=job_id,
            model=model,
            state=JOB_STATES[status.state],
            attempt=status.attempt,
            losses=status.losses,
            updated_at=status.updated_at,
            progress=status.progress,
            server=await self._server(model, job_id) if running and model else None,
            reason=reason,
            error=error,
        )

    async def result(self, job_id: str) -> bytes | None:
        """Return a job's result as JSON text, or ``None`` if there is no result or the result has expired."""
        matches = await self.find(job_id)
        return None if matches is None else (await self._control.results(matches[0], job_id))[0]

    async def cancel(self, job_id: str) -> bool:
        """Cancel a job. Return False if the job is unknown or has ended."""
        matches = await self.find(job_id)
        return matches is not None and await self._control.cancel(matches[0], job_id)

    async def list(
        self, model: str | None = None, *, limit: int = 100, after: str | None = None
    ) -> tuple[DeadLetter, ...]:
        """Return dead letters of one model, or of all models in sequence, the oldest of each model first.

        ``after`` is the last job id of the previous page. If that job is no longer a dead letter, the list of its model
        starts from the beginning.
        """
        check_number("limit", limit, 1, _MOST)
        if after is not None:
            check_name("after", after)
        keys = [queue_of(model)] if model is not None else await self.queues()
        start = "" if after is None else _mark_in(after)
        matches: tuple[DeadLetter, ...] = ()
        for key in keys:
            mark = mark_of_queue(key)
            if mark < start:
                continue
            position = after if mark == start else None
            matches += await self._dead_letters.list(
                key, limit=limit - len(matches), after=position
            )
            if len(matches) == limit:
                break
        return matches

    async def redrive(self, job_id: str) -> bool:
        """Retry a job that is a dead letter. Return False if it is not a dead letter."""
        return any(
            [await self._dead_letters.redrive(key, job_id) for key in await self._of(job_id)]
        )

    async def redrive_all(self, model: str | None = None) -> int:
        """Retry all dead letters of one model, or of all models. Return their number."""
        keys = [queue_of(model)] if model is not None else await self.queues()
        return sum([await self._dead_letters.redrive(key) for key in keys])

    async def discard(self, job_id: str) -> bool:
        """Discard a dead letter permanently. Return False if the job is not a dead letter."""
        return any(
            [await self._dead_letters.discard(key, job_id) for key in await self._of(job_id)]
        )

    async def find(self, job_id: str) -> tuple[str, TaskStatus] | None:
        """Return the queue and the task status of a job, or ``None`` if it is unknown or its record has expired."""
        for key in await self._of(job_id):
            (status,) = await self._control.statuses(key, job_id)
            if status is not None:
                return key, status
        return None

    async def _of(self, job_id: str) -> tuple[str, ...]:
        """Return the queues that may contain a job with this id."""
        check_name("job_id", job_id)
        mark = _mark_in(job_id)
        known = [view.key for view in self._registry.known() if mark_of(view.model) == mark]
        # If no cached model matches, ask the store: the cache may lack a model that is new or has no endpoints.
        if not known:
            known = [key for key in await self._control.queues() if _is_of(key, mark)]
        return tuple(known)

    async def queues(self) -> tuple[str, ...]:
        """Return the queues of all models, including models without endpoints, sorted by the prefix of job ids."""
        keys = {key for key in await self._control.queues() if key.startswith(JOBS)}
        return tuple(sorted(keys, key=mark_of_queue))

    def model_of(self, key: str) -> str | None:
        """Return the model of a queue, or ``None`` if it cannot be determined."""
        for view in self._registry.known():
            if view.key == key:
                return view.model
        return model_of_queue(key)

    async def _server(self, model: str, job_id: str) -> str | None:
        leases = (await self._pool.inspect(model)).leases
        return next((lease.server for lease in leases if lease.job == job_id), None)


def _mark_in(job_id: str) -> str:
    return job_id.partition("-")[0]


def _is_of(key: str, mark: str) -> bool:
    return key.startswith(JOBS) and mark_of_queue(key) == mark


def mark_of_queue(key: str) -> str:
    """Return the prefix of the job ids of a model's queue, or an empty string for any other queue."""
    model = model_of_queue(key)
    if model is not None:
        return mark_of(model)
    return key.rpartition(_CUT)[2][: len(mark_of(_CUT))] if _CUT in key else ""

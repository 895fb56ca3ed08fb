"""What became of jobs: found by their ids alone, whatever their model; and the dead letters of all models."""

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
    """Where a job is, in a client's words."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


_STATES = {
    State.SCHEDULED: JobState.QUEUED,
    State.WAITING: JobState.QUEUED,
    State.IN_FLIGHT: JobState.RUNNING,
    State.DONE: JobState.DONE,
    State.DEAD: JobState.FAILED,
    State.DISCARDED: JobState.FAILED,
    State.EXPIRED: JobState.EXPIRED,
    State.CANCELLED: JobState.CANCELLED,
}


def state_of(state: State) -> JobState:
    """Return the state of a job whose task is in ``state``."""
    return _STATES[state]


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about one job."""

    job_id: str
    model: str | None
    """``None`` where nothing tells it any more: its endpoints and configuration are gone, and its name is a long one"""
    state: JobState
    attempt: int
    losses: int
    updated_at: float
    """Unix seconds of the store's clock"""
    progress: float | str | None = None
    server: str | None = None
    """where it runs, where that is known"""
    reason: str | None = None
    """why it has failed for good, as ``max_retries_exceeded``"""
    error: str | None = None
    """its last failure"""


class Jobs:
    """The jobs of all models. Methods raise `InvalidInput` for what is no id, and `BackendUnavailable`."""

    def __init__(self, backend: Backend, registry: ModelRegistry) -> None:
        """Do no input or output. Raises `CapabilityMissing`."""
        self._control = control_of(backend)
        self._dead_letters = dead_letters_of(backend)
        self._pool = slots_of(backend)
        self._registry = registry

    async def status(self, job_id: str) -> JobStatus | None:
        """Say what is known of a job; ``None`` if it is unknown or forgotten."""
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
            state=state_of(status.state),
            attempt=status.attempt,
            losses=status.losses,
            updated_at=status.updated_at,
            progress=status.progress,
            server=await self._server(model, job_id) if running and model else None,
            reason=reason,
            error=error,
        )

    async def result(self, job_id: str) -> bytes | None:
        """Return a job's result as JSON text; ``None`` where there is none (yet, or any more)."""
        matches = await self.find(job_id)
        return None if matches is None else (await self._control.results(matches[0], job_id))[0]

    async def cancel(self, job_id: str) -> bool:
        """End a job that has not ended. False if there is none."""
        matches = await self.find(job_id)
        return matches is not None and await self._control.cancel(matches[0], job_id)

    # Dead letters.

    async def list(
        self, model: str | None = None, *, limit: int = 100, after: str | None = None
    ) -> tuple[DeadLetter, ...]:
        """Return dead letters of a model, or of all one after another, the oldest of each first.

        ``after`` is the job's id that ended the page before; one that is not dead any more starts its model anew.
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
        """Have a dead job done again. False if it is not dead."""
        return any(
            [await self._dead_letters.redrive(key, job_id) for key in await self._of(job_id)]
        )

    async def redrive_all(self, model: str | None = None) -> int:
        """Have all dead jobs of a model, or of all, done again; return how many."""
        keys = [queue_of(model)] if model is not None else await self.queues()
        return sum([await self._dead_letters.redrive(key) for key in keys])

    async def discard(self, job_id: str) -> bool:
        """Give a dead job up for good. False if it is not dead."""
        return any(
            [await self._dead_letters.discard(key, job_id) for key in await self._of(job_id)]
        )

    # Names.

    async def find(self, job_id: str) -> tuple[str, TaskStatus] | None:
        """Return the queue of a job, and what is known of its task; ``None`` if it is unknown or forgotten."""
        for key in await self._of(job_id):
            (status,) = await self._control.statuses(key, job_id)
            if status is not None:
                return key, status
        return None

    async def _of(self, job_id: str) -> tuple[str, ...]:
        """Return the queues that a job may be in by its id: one, or none."""
        check_name("job_id", job_id)
        mark = _mark_in(job_id)
        known = [view.key for view in self._registry.known() if mark_of(view.model) == mark]
        if not known:  # its model's endpoints may be gone, or new
            known = [key for key in await self._control.queues() if _is_of(key, mark)]
        return tuple(known)

    async def queues(self) -> tuple[str, ...]:
        """Return the queues of all models, those without endpoints too, in the order of their marks."""
        keys = {key for key in await self._control.queues() if key.startswith(JOBS)}
        return tuple(sorted(keys, key=mark_of_queue))

    def model_of(self, key: str) -> str | None:
        """Return the model of a queue; ``None`` where nothing tells."""
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
    """Return what the ids of the jobs of a queue begin with; nothing for a queue that is no model's."""
    model = model_of_queue(key)
    if model is not None:
        return mark_of(model)
    return key.rpartition(_CUT)[2][: len(mark_of(_CUT))] if _CUT in key else ""

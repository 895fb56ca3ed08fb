"""Conversions of task runs between Prefect's objects, tasks of a queue, and rows of the database."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple, Self
from uuid import UUID
from weakref import WeakKeyDictionary

import msgspec

from taskqueue_core.limits import TASK_RUN_BYTES
from taskqueue_core.tasks import Task
from taskqueue_prefect.batching import Batcher
from taskqueue_prefect.names import name_of
from taskqueue_prefect.prefect_types import TaskRun

_BATCH_SIZE = 100
"""maximum number of runs that one query reads"""
NEVER = datetime.fromtimestamp(0, UTC)
"""a time before all changes"""
_state = msgspec.json.Decoder(dict[str, Any])


_readers: WeakKeyDictionary[asyncio.AbstractEventLoop, Batcher[str, TaskRun | None]] = (
    WeakKeyDictionary()
)


class AcceptedRun(msgspec.Struct, frozen=True, kw_only=True):
    """The result that is stored for a run that has left the queue."""

    worker: str | None = None
    """name of the connection of the worker that acknowledged the run; ``None`` if the run was sent to no worker"""
    state: str
    """id of the state that the run had when it left the queue; empty if the run was not in the database"""


Mark = tuple[str, str]
"""ids of a run and of its state"""


class Run(NamedTuple):
    """A task run in its current state, with the fields that are needed to enqueue it."""

    id: UUID
    task_key: str
    name: str
    state_id: str
    """id of the run's state; empty if the run has no state"""
    state_time: datetime
    deferred: bool
    """whether the run is scheduled and waits for a worker"""
    due_at: float | None
    """Unix time for which the run is scheduled; ``None`` if it is due at once"""
    pending: bool = False
    """whether a worker has accepted the run and has not begun it"""
    updated: datetime = NEVER
    """time at which the row of the run changed last"""

    @property
    def mark(self) -> Mark:
        """The ids of the run and of its state."""
        return str(self.id), self.state_id

    @classmethod
    def of(cls, run: TaskRun) -> Self:
        """Return the fields of a Prefect `TaskRun` object."""
        state, about = run.state, (run.id, run.task_key, run.name)
        if not state:
            return cls(*about, "", datetime.min.replace(tzinfo=UTC), deferred=False, due_at=None)
        details = state.state_details
        due = details.scheduled_time
        return cls(
            *about,
            str(state.id),
            state.timestamp,
            deferred=bool(state.is_scheduled() and details.deferred),
            due_at=None if due is None else due.timestamp(),
        )


def task_of(run: Run) -> Task:
    """Return the task that represents a run in the queue. Its id is the run's id; its payload names the run's state.

    The run itself is read from the database when it is delivered, so the payload does not contain it.
    """
    state = {"id": run.state_id, "timestamp": run.state_time.isoformat()}
    fields = {"task_key": run.task_key, "name": run.name, "state": state}
    return Task(key=name_of(run.task_key), id=str(run.id), payload=msgspec.json.encode(fields))


def foreign_reason(task: Task) -> str | None:
    """Return the reason why a task cannot be a run of this database; ``None`` if it can."""
    try:
        UUID(task.id)
        state_of(task)
    except ValueError as error:
        return str(error)
    return None


def state_of(task: Task) -> tuple[str, datetime]:
    """Return the id and the time of the state for which a task was published. Raises `ValueError`."""
    state = _state.decode(task.payload).get("state")
    if not isinstance(state, dict) or not {"id", "timestamp"} <= state.keys():
        raise ValueError(
            "its payload has no state with an id and a timestamp, so no Prefect server published it"
        )
    at = datetime.fromisoformat(str(state["timestamp"]))
    return str(state["id"]), at if at.tzinfo else at.replace(tzinfo=UTC)


def unsendable_reason(run: TaskRun) -> str | None:
    """Return the reason why a run must not be sent to a worker; ``None`` if it may be sent."""
    try:
        size = len(run.model_dump_json())
    except ValueError as error:
        return str(error)
    too_large = f"the run has {size} bytes; a worker accepts at most {TASK_RUN_BYTES}"
    return too_large if size > TASK_RUN_BYTES else None


async def read(run_id: str) -> TaskRun | None:
    """Return a run as it is in the database now; ``None`` if it does not exist.

    Calls of all sockets that are made while the database is being read share the next read.
    """
    loop = asyncio.get_running_loop()
    reader = _readers.get(loop)
    if reader is None:
        reader = _readers[loop] = Batcher(_connected, _BATCH_SIZE)
    return await reader.submit(run_id)


@contextlib.asynccontextmanager
async def _connected() -> AsyncIterator[Callable[[Sequence[str]], Awaitable[list[TaskRun | None]]]]:
    """Connect to the database for several queries. Getting a connection takes as long as two queries."""
    from prefect.server.database import provide_database_interface

    engine = await provide_database_interface().engine()
    async with engine.connect() as connection:
        yield partial(read_many, connection)


async def read_many(connection: Any, run_ids: Sequence[str]) -> list[TaskRun | None]:
    """Return runs with one query; ``None`` for each that does not exist."""
    import sqlalchemy as sa
    from prefect.server.database import provide_database_interface
    from prefect.server.schemas import core
    from sqlalchemy.ext.asyncio import AsyncSession

    db = provide_database_interface()
    query = (
        sa.select(db.TaskRun)
        .where(db.TaskRun.id.in_({UUID(run) for run in run_ids}))
        .options(sa.orm.joinedload(db.TaskRun._state))  # noqa: SLF001 - `state` cannot be loaded with the same query
    )
    async with AsyncSession(connection) as session:
        runs = {
            str(row.id): core.TaskRun.model_validate(row, from_attributes=True)
            for row in (await session.scalars(query)).all()
        }
    return [runs.get(run) for run in run_ids]


async def scheduled_after(last: UUID, limit: int) -> list[Run]:
    """Return up to ``limit`` runs that are scheduled or pending, with ids above ``last``, ordered by id."""
    run = _models().TaskRun
    return await _scheduled(run.id > last, [run.id], limit)


async def scheduled_since(time: datetime, last: UUID, limit: int) -> list[Run]:
    """Return up to ``limit`` runs that are scheduled or pending and have changed since, ordered by time and id.

    A run that changed at ``time`` is included if its id is above ``last``.
    """
    import sqlalchemy as sa

    run = _models().TaskRun
    since = sa.or_(run.updated > time, sa.and_(run.updated == time, run.id > last))
    return await _scheduled(sa.and_(run.updated >= time, since), [run.updated, run.id], limit)


async def scheduled_among(run_ids: Sequence[UUID]) -> list[Run]:
    """Return those of the runs that are scheduled or pending."""
    run = _models().TaskRun
    return await _scheduled(run.id.in_(run_ids), [run.id], len(run_ids))


def _models() -> Any:
    from prefect.server.database import provide_database_interface

    return provide_database_interface()


async def _scheduled(condition: Any, order: Sequence[Any], limit: int) -> list[Run]:
    """Return runs that are scheduled or pending.

    Read only the columns that are needed, because this is done often, and loading Prefect's objects takes longer.
    """
    import sqlalchemy as sa
    from prefect.server.schemas.states import StateType
    from prefect.server.utilities.database import JSON

    db = _models()
    run, state = db.TaskRun, db.TaskRunState
    details = sa.type_coerce(state.state_details, JSON)
    async with db.session_context() as session:
        result = await session.execute(
            sa.select(
                run.id, run.task_key, run.name, run.state_type, state.id, state.timestamp, details,
                run.updated,
            )
            .join(state, state.id == run.state_id)
            .where(run.state_type.in_([StateType.SCHEDULED, StateType.PENDING]), condition)
            .order_by(*order)
            .limit(limit)
        )  # fmt: skip
        return [_run(row, pending=row[3] == StateType.PENDING) for row in result.all()]


def _run(row: Any, *, pending: bool) -> Run:
    run_id, task_key, name, _, state, at, details, updated = row
    due = details.get("scheduled_time")
    due_at = None if due is None else datetime.fromisoformat(due).timestamp()
    deferred = bool(details.get("deferred"))
    waits = deferred and not pending
    return Run(run_id, task_key, name, str(state), at, waits, due_at, deferred and pending, updated)


async def schedule_again(run: Run) -> bool:
    """Set a pending run back to its last scheduled state, which also enqueues it. Return whether Prefect accepted it.

    A worker needs the details of that state, such as the id of the run's parameters; the pending state lacks them.
    """
    from prefect.server import models
    from prefect.server.database import provide_database_interface
    from prefect.server.schemas import states
    from prefect.server.schemas.responses import SetStateStatus

    async with provide_database_interface().session_context(begin_transaction=True) as session:
        current = await models.task_runs.read_task_run(session=session, task_run_id=run.id)
        if current is None or str(current.state_id) != run.state_id:
            return False  # the run has changed since
        history = await models.task_run_states.read_task_run_states(
            session=session, task_run_id=run.id
        )
        for state in sorted(history, key=lambda state: state.timestamp, reverse=True):
            if state.type == states.StateType.SCHEDULED and state.state_details.deferred:
                again = states.State(
                    type=state.type, name=state.name, state_details=state.state_details
                )
                result = await models.task_runs.set_task_run_state(
                    session=session, task_run_id=run.id, state=again, force=True
                )
                return bool(result.status == SetStateStatus.ACCEPT)
        return False

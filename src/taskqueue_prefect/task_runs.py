"""Conversions of task runs between Prefect's objects, tasks of a queue, and rows of the database."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, NamedTuple, Self
from uuid import UUID

import msgspec

from taskqueue_core.limits import TASK_RUN_BYTES, in_bytes
from taskqueue_core.tasks import Task
from taskqueue_prefect.names import name_of
from taskqueue_prefect.prefect_types import TaskRun

NEVER = datetime.fromtimestamp(0, UTC)
"""a time before all changes"""
_state = msgspec.json.Decoder(dict[str, Any])
_decode = msgspec.json.decode


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


def state_of(task: Task) -> tuple[str, datetime]:
    """Return the id and the time of the state for which a task was published.

    Raises `ValueError` if the task cannot be a run of this database.
    """
    UUID(task.id)
    state = _state.decode(task.payload).get("state")
    if not isinstance(state, dict) or not {"id", "timestamp"} <= state.keys():
        raise ValueError(
            "its payload has no state with an id and a timestamp, so no Prefect server published it"
        )
    at = datetime.fromisoformat(str(state["timestamp"]))
    return str(state["id"]), at if at.tzinfo else at.replace(tzinfo=UTC)


class StoredRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run as it is in the database, with the parts of a `TaskRun` that the handler of a worker's socket uses."""

    id: str
    task_key: str
    state_id: str
    """id of the run's state; empty if the run has no state"""
    state_time: datetime
    deferred: bool
    """whether the run is scheduled and waits for a worker"""
    message: dict[str, Any] = {}
    """the run as it is sent to a worker; empty if the run is not deferred"""
    fault: str | None = None
    """the reason why a deferred run must not be sent"""

    def has_reached(self, state: str, at: datetime) -> bool:
        """Return whether the run has the state for which it was enqueued, or a later one."""
        return self.state_id == state or self.state_time > at

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """Return the run as it is sent to a worker."""
        return self.message


class _Columns:
    """Some columns of a table, and the conversion of their values. JSON is read as text, which is faster."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        import sqlalchemy as sa
        from prefect.server.utilities.database import JSON, Pydantic

        json = {
            name for name, column in columns.items() if isinstance(column.type, JSON | Pydantic)
        }
        self.selected = [
            sa.cast(column, sa.Text) if name in json else column for name, column in columns.items()
        ]
        self._decoders = [(name, _decode if name in json else None) for name in columns]

    def values(self, row: Sequence[Any]) -> dict[str, Any]:
        """Return the values of a row by name."""
        return {
            name: value if decode is None or value is None else decode(value)
            for (name, decode), value in zip(self._decoders, row, strict=True)
        }


class RunReader:
    """Reads runs with their states from the database, with one query that is prepared once.

    Prefect's objects are not loaded, which would take longer. What is sent is validated by Prefect's schema.
    """

    def __init__(self, dialect: str) -> None:
        import sqlalchemy as sa
        from prefect.server.schemas import core, states

        db = _models()
        run, state, fields = db.TaskRun, db.TaskRunState, core.TaskRun.model_fields
        attributes, computed = sa.inspect(run).column_attrs, sa.inspect(run).all_orm_descriptors
        self._run = _Columns({name: getattr(run, name) for name in fields if name in attributes})
        self._computed = {
            name: computed[name].fget
            for name in fields.keys() - attributes.keys() - {"state"}
            if name in computed
        }
        attributes = sa.inspect(state).column_attrs
        names = [name for name in states.State.model_fields if name in attributes]
        columns = {name: getattr(state, name) for name in names}
        data = {"data": state._data, "artifact": db.Artifact.data}  # noqa: SLF001 - `data` is not a column
        self._state = _Columns(columns | data)
        # With an array the text of the query, which PostgreSQL prepares, is the same for any number of runs.
        wanted = (
            run.id == sa.func.any(sa.bindparam("ids", type_=sa.ARRAY(run.id.type)))
            if dialect == "postgresql"
            else run.id.in_(sa.bindparam("ids", expanding=True))
        )
        self._query = (
            sa.select(*self._run.selected, *self._state.selected)
            .outerjoin(state, state.id == run.state_id)
            .outerjoin(db.Artifact, db.Artifact.id == state.result_artifact_id)
            .where(wanted)
        )

    async def read(self, connection: Any, run_ids: Sequence[str]) -> list[StoredRun | None]:
        """Return runs with one query; ``None`` for each that does not exist."""
        rows = await connection.run_sync(self._rows, {UUID(run) for run in run_ids})
        runs = {run.id: run for run in map(self._stored_run, rows)}
        return [runs.get(run) for run in run_ids]

    def _rows(self, connection: Any, run_ids: Iterable[UUID]) -> Sequence[Any]:
        with (
            connection.begin()
        ):  # a transaction of its own, so that the query sees all that is committed
            return connection.execute(self._query, {"ids": list(run_ids)}).all()  # type: ignore[no-any-return]

    def _stored_run(self, row: Sequence[Any]) -> StoredRun:
        from prefect.server.schemas import core
        from prefect.server.schemas.states import StateType

        count = len(self._run.selected)
        values, state = self._run.values(row[:count]), self._state.values(row[count:])
        about: dict[str, Any] = {
            "id": str(values["id"]),
            "task_key": values["task_key"],
            "state_id": str(state["id"] or ""),
            "state_time": state["timestamp"] or NEVER,
        }
        deferred = state["type"] == StateType.SCHEDULED and state["state_details"].get("deferred")
        if not deferred:
            return StoredRun(**about, deferred=False)
        state["data"] = state["data"] or state["artifact"]
        run = SimpleNamespace(**values)
        values |= {name: compute(run) for name, compute in self._computed.items()}
        try:
            message = core.TaskRun.model_validate(values | {"state": state}).model_dump(mode="json")
            fault = size_fault(message)
        except ValueError as error:
            return StoredRun(**about, deferred=True, fault=str(error))
        return StoredRun(**about, deferred=True, message=message, fault=fault)


def size_fault(message: Mapping[str, Any]) -> str | None:
    """Return the reason why a run is too large for a worker; ``None`` if it is not. Raises `ValueError`."""
    size = len(msgspec.json.encode(message))
    too_large = f"the run has {in_bytes(size)}; a worker accepts at most {TASK_RUN_BYTES}"
    return too_large if size > TASK_RUN_BYTES else None


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

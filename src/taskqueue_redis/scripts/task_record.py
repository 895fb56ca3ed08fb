"""Parsing the packed records and the history of tasks, and the fields of queues."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
from pydantic import ValidationError

from taskqueue_core.after import TaskRef
from taskqueue_core.authoring.entries import error_of
from taskqueue_core.capabilities import Order, QueueSettings
from taskqueue_core.rate_limit import RateLimit
from taskqueue_core.tasks import DeadLetter, Failure, Ledger, State, Task, TaskStatus
from taskqueue_redis.scripts.runner import microseconds, seconds
from taskqueue_redis.scripts.task_codec import Corrupt, decode, ref_of, salvage

# The format is defined in lua/lib/states.lua. Each number of 7 bytes is unpacked as a byte string.
_RECORD = struct.Struct(">BBBHHHH7s7s7s8sBB7s")
_MARKS = 3
"""number of bytes between the packed numbers and the tenant, in a record with a tenant or an ordering key"""
_KINDS = {1: "s", 2: "r"}
"""letter of the stream that stores the body, by the number in the record; other numbers mean no stream"""
_POSITIONS = {
    State.WAITING: (1, 2, 3, 4),
    State.SCHEDULED: (3,),
    State.DEAD: (3,),
    State.BLOCKED: (3,),
}
"""numbers of the places where an entry can be, by the state of its task; 0 means nowhere"""
_STATES = {
    1: State.WAITING,
    2: State.SCHEDULED,
    3: State.DONE,
    4: State.DEAD,
    5: State.EXPIRED,
    6: State.CANCELLED,
    7: State.DISCARDED,
    9: State.BLOCKED,
}
"""states by their numbers; 8 is not that of a task: it remembers the id of a publish that replaced another one"""
NUMBERS = {state: number for number, state in _STATES.items()} | {State.IN_FLIGHT: 10}
"""numbers of the states for the script ``list``"""
_PRIORITIES = 9
"""highest priority"""
_decoder = msgspec.msgpack.Decoder(dict[str, Any])
_progress_decoder = msgspec.msgpack.Decoder(float | str)


class TaskRecord(NamedTuple):
    """The parsed record of a task. A task in flight has the state WAITING, because a delivery does not change that."""

    state: State
    attempt: int
    losses: int
    priority: int
    tenant: str | None
    """tenant of the task; None if the task has no tenant or has ended"""
    ordering_key: str | None
    since: int
    """time of the last change of the record, in microseconds"""
    stream: str | None
    """suffix of the name of the stream that has the entry; the task is in flight if its ``fence`` is pending there"""
    fence: int


def status_of(key: str, task_id: str, reply: list[Any]) -> TaskStatus | None:
    """Parse the answer of the script ``status`` for one task; return None if the task is unknown."""
    if not reply:
        return None
    packed, in_flight, cold, progress, due, blocked = reply
    record = record_of(packed)
    if record is None:
        return None
    history, reason = cold_of(cold)
    last = history[-1] if history else None
    held_by, waits_for, total = blocked or ((), (), 0)
    state = State.IN_FLIGHT if in_flight else record.state
    return TaskStatus(
        key=key,
        task_id=task_id,
        state=state,
        attempt=record.attempt,
        losses=record.losses,
        updated_at=seconds(record.since),
        progress=_progress(progress),
        error=error_of(state, reason, last),
        last_failure=last,
        due_at=None if due is None else float(due) / 1_000_000,
        held_by=_refs(held_by),
        waits_for=_refs(waits_for),
        waits_for_total=total,
    )


def dead_letter_of(key: str, reply: list[Any]) -> DeadLetter:
    """Parse one answer of the script ``dead_letters``."""
    task_id, packed, cold, body = reply[0].decode(), *reply[1:]
    record = record_of(packed)
    history, reason = cold_of(cold)
    return DeadLetter(
        task=task_in(key, task_id, 5 if record is None else record.priority, body),
        attempt=len(history) if record is None else record.attempt,
        losses=0 if record is None else record.losses,
        reason=reason or "",
        failed_at=0.0 if record is None else seconds(record.since),
        history=tuple(history),
    )


def record_of(packed: bytes | None) -> TaskRecord | None:
    """Parse the packed record of a task; return None if it is missing or damaged."""
    if packed is None or len(packed) < _RECORD.size:
        return None
    state, position, priority, attempt, losses, _, _, _, fence, at, *_ = _RECORD.unpack_from(packed)
    tenant, separator, entity = (
        packed[_RECORD.size + _MARKS :].decode(errors="replace").partition("/")
    )
    entity, _, _ = entity.partition("/")  # the batch follows
    if state not in _STATES or priority > _PRIORITIES:
        return None
    if position not in _POSITIONS.get(_STATES[state], (0,)):
        return None
    if len(packed) > _RECORD.size and not separator:
        return None
    over = _STATES[state] not in _POSITIONS  # other fields are in the place of the ordering key
    return TaskRecord(
        state=_STATES[state],
        attempt=attempt,
        losses=losses,
        priority=priority,
        tenant=None if over else tenant or None,
        ordering_key=None if over else entity or None,
        since=int.from_bytes(at, "big"),
        stream=f"{_KINDS[position]}{priority}" if position in _KINDS else None,
        fence=int.from_bytes(fence, "big"),
    )


def state_of(number: int) -> State:
    """Return the state with a number of the script ``list``."""
    return State.IN_FLIGHT if number == NUMBERS[State.IN_FLIGHT] else _STATES[number]


def ledger_of(counters: Mapping[str, str]) -> Ledger:
    """Return the ledger that the counters of a queue contain."""
    return Ledger(**{name: number_in(counters, name) for name in Ledger.__struct_fields__})


def number_in(counters: Mapping[str, str], name: str) -> int:
    """Return a counter of a queue; 0 if it is missing or damaged."""
    text = counters.get(name, "0")
    return int(text) if text.isascii() and text.isdigit() else 0


def settings_in(fields: Mapping[str, str]) -> QueueSettings | None:
    """Return the settings among the fields of a queue, ``None`` if they and their copy are damaged."""
    texts = [fields[name] for name in ("settings", "copied") if name in fields]
    for text in texts:
        with contextlib.suppress(ValidationError):
            return QueueSettings.model_validate_json(text)
    return None if texts else QueueSettings()


def limits_of(settings: QueueSettings) -> tuple[int | float, ...]:
    """Return the limits in the order of FLOWS in lua/lib/flow.lua."""
    return (
        settings.capacity or 0,
        settings.max_inflight or 0,
        *_bucket(settings.rate_limit),
        int(settings.paused),
        int(settings.intake_paused),
        int(settings.moved_to is not None),
        microseconds(settings.max_processing_time or 0),
        int(settings.order is Order.FAIR),
        int(bool(settings.weights)) + 2 * bool(settings.paused_tenants),
        settings.tenant_capacity or 0,
        settings.tenant_max_inflight or 0,
        *_bucket(settings.tenant_rate_limit),
        settings.floor_share,
        microseconds(settings.timeout or 0),
    )


def weights_of(settings: QueueSettings) -> bytes:
    """Return the weights of tenants as JSON, negative for those that are paused; nothing if there are none."""
    weights = dict(settings.weights)
    weights |= {tenant: -weights.get(tenant, 1) for tenant in settings.paused_tenants}
    return msgspec.json.encode(weights) if weights else b""


def _bucket(limit: RateLimit | None) -> tuple[int, int]:
    return (limit.max_tokens, microseconds(limit.period)) if limit else (0, 0)


def pairs(reply: list[bytes]) -> dict[str, str]:
    """Convert the list of alternating fields and values of a Redis hash to a mapping."""
    return {
        reply[n].decode(errors="replace"): reply[n + 1].decode(errors="replace")
        for n in range(0, len(reply), 2)
    }


def task_in(key: str, task_id: str, priority: int, body: bytes | None) -> Task:
    """Return the task in a body, or a substitute if the body is damaged."""
    try:
        return decode(key, task_id, priority, body or b"")
    except Corrupt:
        return salvage(key, task_id, priority, body or b"")


def _refs(names: Iterable[bytes]) -> tuple[TaskRef, ...]:
    refs = (ref_of(name.decode()) for name in names)
    return tuple(sorted(refs, key=lambda ref: (ref.key, ref.task_id)))


def _progress(packed: bytes | None) -> float | str | None:
    try:
        return None if packed is None else _progress_decoder.decode(packed)
    except msgspec.DecodeError:  # damaged
        return None


def cold_of(packed: bytes | None) -> tuple[list[Failure], str | None]:
    """Parse the history of a task and the reason of its end."""
    if packed is None:
        return [], None
    try:
        cold = _decoder.decode(packed)
    except msgspec.DecodeError:  # damaged
        return [], None
    failures = cold.get("h") or []
    history = [
        Failure(
            attempt=attempt,
            at=at / 1_000_000,
            error=error,
            traceback=(more[0] or None) if more else None,
            worker=more[1] if len(more) > 1 else None,
        )
        for attempt, at, error, *more in failures
    ]
    return history, cold.get("r")

"""Schedules: what is published, when, and what happens to instants that were missed."""

from __future__ import annotations

import hashlib
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast, get_args

import msgspec
from msgspec.structs import force_setattr as set_field

from taskqueue_core.errors import InvalidInput
from taskqueue_core.json_text import encode_json
from taskqueue_core.limits import (
    LIMITS,
    check_choice,
    check_duration,
    check_headers,
    check_name,
    kind_of,
)
from taskqueue_core.schedules.when import Cron, Every, When, checked_datetime, following, text_of
from taskqueue_core.tasks import DEFAULT_PRIORITY, Task
from taskqueue_core.uniqueness import UniqueKey

__all__ = [
    "INSTANT_HEADER",
    "SCHEDULE_HEADER",
    "CatchUp",
    "Instant",
    "InstantForm",
    "Overlap",
    "Schedulable",
    "Schedule",
    "TaskTemplate",
    "check_overlap",
    "is_instant",
    "next_instant",
    "scheduled_task",
]

SCHEDULE_HEADER = "taskqueue-schedule"
"""header with the name of the schedule that published a task"""
INSTANT_HEADER = "taskqueue-instant"
"""header with the instant for which a schedule published a task, in ISO 8601"""
CatchUp = Literal["none", "last", "all"]
Overlap = Literal["skip", "allow", "wait", "replace"]
InstantForm = Literal["text", "seconds"]
_DAY = 86_400
_Payload = dict[str, msgspec.Raw]


class _Instant:
    def __repr__(self) -> str:
        return "Instant"


Instant: Any = _Instant()
"""an argument of a call in a schedule: it becomes the instant for which the schedule fires

The parameter is a ``datetime``, a number (Unix seconds) or text (ISO 8601).

>>> schedule = Schedule("report", Cron("@daily"), report.call(day=Instant))
"""


def is_instant(value: object) -> bool:
    """Return whether a value is `Instant`."""
    return isinstance(value, _Instant)


class TaskTemplate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The task that a schedule publishes. Raises `InvalidInput`, which names the field.

    >>> template = TaskTemplate.of("mail", {"to": "ada"}, priority=7, expires_in=3600)
    """

    key: str
    """name of the queue"""
    payload: msgspec.Raw = msgspec.Raw(b"null")
    """the payload as JSON text"""
    headers: dict[str, str] = {}
    priority: int = DEFAULT_PRIORITY
    tenant: str | None = None
    ordering_key: str | None = None
    max_attempts: int | None = None
    tags: tuple[str, ...] = ()
    expires_in: float | None = None
    """seconds after which the task is no longer delivered, counted from the time at which it becomes available"""
    instants: dict[str, InstantForm] = {}
    """members of the payload, a JSON object, that the instant is written into: as ISO 8601 text, or as Unix seconds"""
    unique: UniqueKey | None = None
    """unique key of the tasks, without a debounce; it takes the place of the key of `Schedule.overlap`"""
    content_digest: bytes | None = None
    """digest of the content before it was encoded by a codec, as in `Task`"""

    def __post_init__(self) -> None:
        payload: object = self.payload
        if isinstance(payload, bytes):
            set_field(self, "payload", msgspec.Raw(payload))
        elif not isinstance(payload, msgspec.Raw):
            raise InvalidInput("payload", kind_of(payload), "JSON text, as bytes")
        if self.expires_in is not None:
            check_duration("expires_in", self.expires_in)
        check_headers("headers", self.headers)
        _check_instants(self.instants)
        if isinstance(self.unique, UniqueKey) and self.unique.debounce is not None:
            raise InvalidInput(
                "unique", "a unique key with a debounce", "one without: a schedule sets the time"
            )
        self.task("x" * LIMITS.name, "x" * LIMITS.name, 0.001, 0.0)  # checks all fields and sizes

    @staticmethod
    def of(key: str, payload: object = None, **fields: Any) -> TaskTemplate:
        """Return a template whose payload is ``payload`` encoded as JSON. Raises `InvalidInput`."""
        return TaskTemplate(key=key, payload=msgspec.Raw(encode_json("payload", payload)), **fields)

    def task(
        self,
        task_id: str,
        schedule: str,
        instant: float,
        available: float,
        overlap: Overlap = "allow",
        *,
        delayed: bool = False,
    ) -> Task:
        """Return the task of one instant. It becomes available at the time ``available``, or at once."""
        ordering_key, key_of_schedule = _overlap(schedule, overlap)
        names = {SCHEDULE_HEADER: schedule, INSTANT_HEADER: text_of(instant)}
        return Task(
            key=self.key,
            id=task_id,
            payload=self._payload(instant),
            headers={**self.headers, **names},
            priority=self.priority,
            tenant=self.tenant,
            ordering_key=ordering_key or self.ordering_key,
            unique=key_of_schedule if self.unique is None else self.unique,
            max_attempts=self.max_attempts,
            tags=self.tags,
            not_before=available if delayed else None,
            deadline=None if self.expires_in is None else available + self.expires_in,
            content_digest=self.content_digest,
        )

    def _payload(self, instant: float) -> bytes:
        if not self.instants:
            return bytes(self.payload)
        try:
            members = msgspec.json.decode(self.payload, type=_Payload)
        except (msgspec.MsgspecError, ValueError) as error:
            raise InvalidInput(
                "instants", "a payload that is no JSON object", "instants of a JSON object"
            ) from error
        number = int(instant) if instant == int(instant) else instant
        forms = {"text": text_of(instant), "seconds": number}
        for name, form in self.instants.items():
            members[name] = msgspec.Raw(msgspec.json.encode(forms[form]))
        return msgspec.json.encode(members)


def _overlap(schedule: str, overlap: Overlap) -> tuple[str | None, UniqueKey | None]:
    """Return the ordering key and the unique key with which the store decides about an overlap."""
    key = f"schedule:{schedule}"
    if overlap == "allow":
        return None, None
    if overlap == "wait":  # the tasks run one after another, and at most one of them waits
        return key, UniqueKey(key=key, until="started")
    return None, UniqueKey(key=key, on_conflict="replace" if overlap == "replace" else "keep")


def _check_instants(instants: object) -> None:
    if not isinstance(instants, dict) or len(instants) > LIMITS.headers:
        raise InvalidInput(
            "instants", kind_of(instants), f"at most {LIMITS.headers} names of members"
        )
    forms = get_args(InstantForm)
    if not all(isinstance(name, str) and form in forms for name, form in instants.items()):
        raise InvalidInput(
            "instants", "a member without a form", "names of members with 'text' or 'seconds'"
        )


class Schedulable(Protocol):
    """What a schedule can publish: a `taskqueue_core.Call`."""

    def template(self) -> TaskTemplate:
        """Return the task to publish, without an id. Raises `InvalidInput`."""


class Schedule(msgspec.Struct, frozen=True, omit_defaults=True):
    """A task that the store publishes once for each instant. Raises `InvalidInput`, which names the field.

    The id of the task is the name of the schedule, a dot and the instant: ``digest.2026-03-29T01:00:00Z``. Its headers
    ``taskqueue-schedule`` and ``taskqueue-instant`` contain both.

    >>> schedule = Schedule("resize.cats", Every(3600), resize.call("cats.png"), catch_up="none")
    >>> status = await queue.schedules.put(schedule)
    """

    name: str
    """name of the schedule, which is unique in the store; at most 170 characters"""
    when: When
    if TYPE_CHECKING:
        call: Schedulable | TaskTemplate
        """what is published, with fixed arguments; `task` is the same as data"""
    else:
        call: TaskTemplate
    catch_up: CatchUp = "last"
    """which of the instants that were missed are made up for: none, the last one, or all (at most 1,000)

    An instant counts as missed if it is more than a minute old, or if a later one has come.
    """
    late: float = 3600
    """seconds after which an instant is skipped: nothing is published for it any more"""
    overlap: Overlap = "skip"
    """what happens if the task of an earlier instant has not ended: see docs/schedules.md

    If the task has a unique key of its own, that key decides, and it must agree with ``overlap``.
    """
    jitter: float = 0
    """maximum number of seconds by which a task is delayed; the delay follows from the name and the instant"""
    starts: datetime | None = None
    """time before which there are no instants"""
    ends: datetime | None = None
    """time from which on there are no instants"""
    paused: bool = False
    """whether the schedule is paused when it is created"""

    def __post_init__(self) -> None:
        check_schedule_name(self.name)
        if not isinstance(self.when, Cron | Every):
            raise InvalidInput("when", kind_of(self.when), "a Cron or an Every")
        if not isinstance(self.call, TaskTemplate):
            if not hasattr(self.call, "template"):
                raise InvalidInput(
                    "call", kind_of(self.call), "a call, as in resize.call('cat.png')"
                )
            set_field(self, "call", self.call.template())
        check_choice("catch_up", self.catch_up, get_args(CatchUp))
        check_duration("late", self.late)
        if self.late < 1:
            raise InvalidInput("late", "a number that is not allowed", "a number of seconds from 1")
        check_duration("jitter", self.jitter)
        if self.jitter > _DAY:
            raise InvalidInput("jitter", "a number that is not allowed", "at most 86400 seconds")
        if not isinstance(self.paused, bool):
            raise InvalidInput("paused", kind_of(self.paused), "true or false")
        starts = checked_datetime("starts", self.starts)
        ends = checked_datetime("ends", self.ends)
        if ends is not None and ends <= (starts or 0):
            raise InvalidInput("ends", "a time that is not later than starts", "a later time")
        check_overlap(self.overlap, self.task)

    @property
    def task(self) -> TaskTemplate:
        """The task that is published, without its id."""
        return cast("TaskTemplate", self.call)

    def delay(self, instant: float) -> float:
        """Return the seconds, up to `jitter`, by which the task of an instant is delayed: the same in each process."""
        if not self.jitter:
            return 0.0
        digest = hashlib.blake2b(f"{self.name}\n{text_of(instant)}".encode(), digest_size=6)
        return round(int.from_bytes(digest.digest()) / 2**48 * self.jitter, 3)


def next_instant(schedule: Schedule, after: float) -> float | None:
    """Return the first instant of a schedule that is later than ``after``; ``None`` if there is none."""
    starts = checked_datetime("starts", schedule.starts)
    instant = following(schedule.when, after)
    if starts is not None and after < starts:
        instant = following(schedule.when, max(0.0, starts - 1.0))
        while instant is not None and instant < starts:
            instant = following(schedule.when, instant)
    if instant is None or (schedule.ends is not None and instant >= schedule.ends.timestamp()):
        return None
    return instant


def scheduled_task(schedule: Schedule, instant: float, now: float | None = None) -> Task:
    """Return the task that a schedule publishes for an instant: the same one in each process.

    ``now`` is given for a task that an operator asks for: it is available at once, and does not expire before.
    """
    task_id = f"{schedule.name}.{text_of(instant)}"
    delay = schedule.delay(instant) if now is None else 0.0
    available = instant + delay if now is None else max(instant, now)
    return schedule.task.task(
        task_id, schedule.name, instant, available, schedule.overlap, delayed=delay > 0
    )


def check_schedule_name(name: object) -> None:
    """Check the name of a schedule: the ids of its tasks, which consist of it and the instant, must be names, too."""
    check_name("name", name)
    if len(cast("str", name)) > LIMITS.schedule_name:
        raise InvalidInput("name", kind_of(name), f"at most {LIMITS.schedule_name} characters")


def check_overlap(overlap: object, task: TaskTemplate) -> None:
    """Check what happens if tasks of a schedule overlap. Raises `InvalidInput`."""
    check_choice("overlap", overlap, get_args(Overlap))
    if overlap == "wait" and task.ordering_key is not None:
        raise InvalidInput(
            "overlap", "'wait' with an ordering key", "another overlap, or no ordering key"
        )
    _, needed = _overlap("", cast("Overlap", overlap))
    if task.unique is None or needed is None:
        return
    until, on_conflict = task.unique.until, task.unique.on_conflict
    if on_conflict == "refuse":
        on_conflict = "keep"  # both skip the instant
    if (until, on_conflict) != (needed.until, needed.on_conflict):
        raise InvalidInput(
            "overlap",
            f"{overlap!r} with a unique key of until={until!r} and on_conflict={task.unique.on_conflict!r}",
            "overlap='allow', so that the unique key alone decides, or a unique key of "
            f"until={needed.until!r} and on_conflict={needed.on_conflict!r}",
        )

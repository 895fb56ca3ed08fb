"""Bodies of requests and responses for schedules. Times are Unix seconds, as in the rest of the API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw

from taskqueue_core.capabilities import Outcome
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS
from taskqueue_core.schedule_status import ScheduleStatus
from taskqueue_core.schedules import Cron, Every, InstantForm, Schedule, TaskTemplate
from taskqueue_core.tasks import DEFAULT_PRIORITY
from taskqueue_server.api.models import ConfirmationOut
from taskqueue_server.api.task_models import UniqueIn
from taskqueue_server.routing.schemas import (
    Attempts,
    ContentDigest,
    HeadersField,
    Instant,
    Name,
    Priority,
    Seconds,
    Tags,
)

_Overlap = Literal["skip", "allow", "wait", "replace"]
_Version = Annotated[int, Meta(extra_json_schema={"minimum": 0})]


class CronIn(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag="cron",
    tag_field="type",
    forbid_unknown_fields=True,
):
    """The times that a cron expression with five fields names, or a name such as ``@daily``, in a time zone."""

    expression: Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": 1000})]
    timezone: str = "UTC"


class EveryIn(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag="every",
    tag_field="type",
    forbid_unknown_fields=True,
):
    """A fixed interval of at least one second, from the time ``since`` on, or else from 1970 on."""

    seconds: Annotated[float, Meta(extra_json_schema={"minimum": 1})]
    since: Instant | None = None


class TemplateIn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The task that is published. ``instants`` names members of the payload that become the instant."""

    key: Name
    payload: Raw = msgspec.field(default_factory=lambda: Raw(b"null"))
    headers: HeadersField = {}
    priority: Priority = DEFAULT_PRIORITY
    tenant: Name | None = None
    ordering_key: Name | None = None
    max_attempts: Attempts | None = None
    tags: Tags = ()
    expires_in: Seconds | None = None
    instants: dict[str, InstantForm] = {}
    unique: UniqueIn | None = None
    content_digest: ContentDigest | None = None


class ScheduleBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is published when, and what happens to instants that were missed."""

    when: CronIn | EveryIn
    call: TemplateIn
    catch_up: Literal["none", "last", "all"] = "last"
    late: Seconds = 3600
    overlap: _Overlap = "skip"
    jitter: Seconds = 0
    starts: Instant | None = None
    ends: Instant | None = None
    paused: bool = False

    def to_schedule(self, name: str) -> Schedule:
        """Return the checked schedule. Raises `InvalidInput` with the path of the field."""
        when: Cron | Every
        with _inside("schedule.when."):
            if isinstance(self.when, CronIn):
                when = Cron(self.when.expression, self.when.timezone)
            else:
                when = Every(self.when.seconds, _moment("since", self.when.since))
        with _inside("schedule.call."):
            call = msgspec.structs.asdict(self.call)
            call["payload"] = Raw(bytes(self.call.payload))
            call["unique"] = None if self.call.unique is None else self.call.unique.to_key()
            template = TaskTemplate(**call)
        with _inside("schedule."):
            fields = {name: getattr(self, name) for name in _SAME}
            return Schedule(
                name,
                when,
                template,
                starts=_moment("starts", self.starts),
                ends=_moment("ends", self.ends),
                **fields,
            )

    @classmethod
    def of(cls, schedule: Schedule) -> ScheduleBody:
        """Return the body of a schedule."""
        given = schedule.when
        when: CronIn | EveryIn
        if isinstance(given, Cron):
            when = CronIn(expression=given.expression, timezone=given.timezone)
        else:
            when = EveryIn(seconds=given.seconds, since=_seconds(given.since))
        call = msgspec.structs.asdict(schedule.task)
        if schedule.task.unique is not None:
            call["unique"] = UniqueIn(**msgspec.structs.asdict(schedule.task.unique))
        return cls(
            when=when,
            call=TemplateIn(**call),
            starts=_seconds(schedule.starts),
            ends=_seconds(schedule.ends),
            **{name: getattr(schedule, name) for name in _SAME},
        )


_SAME = ("catch_up", "late", "overlap", "jitter", "paused")


class ScheduleIn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A schedule to store."""

    schedule: ScheduleBody
    version: _Version | None = None
    """the version to replace; 0: there must be none"""
    declared_by: Annotated[str, Meta(extra_json_schema={"maxLength": LIMITS.name})] | None = None
    """the prefix of the registry that declares it; without it, an apply of a registry does not change it"""


class ScheduleOut(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule with its state. ``schedule`` is null if the server cannot read it; ``problem`` says why."""

    name: str
    key: str
    schedule: ScheduleBody | None
    next_at: float | None
    paused: bool
    version: int
    declared_by: str | None
    recent: tuple[Outcome, ...]
    refused: Outcome | None
    problem: str | None

    @classmethod
    def of(cls, status: ScheduleStatus, *, payload: bool = True) -> ScheduleOut:
        """Return the body of a stored schedule. Without ``payload``, that of its task is null."""
        found = status.schedule
        body = None if found is None else ScheduleBody.of(found)
        if body is not None and not payload:
            task = msgspec.structs.replace(body.call, payload=Raw(b"null"))
            body = msgspec.structs.replace(body, call=task)
        fields = msgspec.structs.asdict(status)
        fields["schedule"] = body
        return cls(**fields)


class SchedulesOut(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A page of schedules, sorted by name. If there is a ``next``, pass it as ``after`` for the next page."""

    schedules: list[ScheduleOut]
    next: str | None = None


class Deleted(msgspec.Struct, frozen=True, kw_only=True):
    """Whether there was a schedule to delete."""

    deleted: bool


class InstantsOut(msgspec.Struct, frozen=True):
    """Times in Unix seconds."""

    instants: tuple[float, ...]


class RunIn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The instants to publish tasks for: from ``since`` to before ``until``; without both, now."""

    since: Instant | None = None
    until: Instant | None = None
    overlap: _Overlap | None = None
    """what happens if an earlier task has not ended: by default that of the schedule, for past instants ``allow``"""


class RunOut(msgspec.Struct, frozen=True):
    """The result of publishing each task."""

    confirmations: list[ConfirmationOut]


@contextmanager
def _inside(parent: str) -> Iterator[None]:
    try:
        yield
    except InvalidInput as error:
        field = error.field if error.field == "name" else parent + error.field
        raise type(error)(field, error.got, error.allowed) from error


def _moment(field: str, at: float | None) -> datetime | None:
    if at is None:
        return None
    try:
        return datetime.fromtimestamp(at, UTC)
    except (ValueError, OverflowError, OSError) as error:
        allowed = "a time in the years 1970 to 9999, in Unix seconds"
        raise InvalidInput(field, "a number that is not allowed", allowed) from error


def _seconds(at: datetime | None) -> float | None:
    return None if at is None else at.timestamp()

"""What requests and answers of the dispatcher's operations look like. The OpenAPI document is made from these."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from taskqueue_core.capabilities import EndpointInfo
from taskqueue_core.limits import LIMITS
from taskqueue_core.queue import instant
from taskqueue_core.tasks import DEFAULT_PRIORITY, DeadLetter
from taskqueue_dispatch.callbacks.records import CallbackRecord
from taskqueue_dispatch.jobs import Submission
from taskqueue_dispatch.registry import ModelView
from taskqueue_dispatch.status import JobStatus
from taskqueue_server.routing.schemas import Instant, Label, Name, Priority, Seconds

_Url = Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": LIMITS.url})]
_Slots = Annotated[int, Meta(extra_json_schema={"minimum": 1, "maximum": LIMITS.slots})]


class SubmissionIn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job for a model's servers.

    ``expires_in`` and ``delay`` are seconds from now, ``deadline`` and ``not_before`` are Unix seconds. The payload
    goes to the server byte for byte.
    """

    model: Label
    payload: Raw = msgspec.field(default_factory=lambda: Raw(b"null"))
    callback_url: _Url | None = None
    priority: Priority = DEFAULT_PRIORITY
    deadline: Instant | None = None
    expires_in: Seconds | None = None
    not_before: Instant | None = None
    delay: Seconds | None = None
    tenant: Name | None = None
    idempotency_key: Name | None = None

    def submission(self, now: float, idempotency_key: str | None) -> Submission:
        """Return what is submitted at ``now``. Raises `InvalidInput`."""
        return Submission(
            model=self.model,
            payload=bytes(self.payload),
            callback_url=self.callback_url,
            priority=self.priority,
            deadline=instant(now, "expires_in", self.expires_in, "deadline", self.deadline),
            not_before=instant(now, "delay", self.delay, "not_before", self.not_before),
            tenant=self.tenant,
            idempotency_key=idempotency_key,
        )


class HandleIn(SubmissionIn, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job that a queue upstream pushes, with its id there."""

    job_id: Name


class LeasedOut(msgspec.Struct, frozen=True, kw_only=True):
    """A slot is free for the job. ``server`` is null where it is not settled yet which."""

    outcome: Literal["leased"] = "leased"
    job_id: str
    server: str | None


class QueuedOut(msgspec.Struct, frozen=True, kw_only=True):
    """The job waits behind so many others, for so many seconds as far as is known."""

    outcome: Literal["queued"] = "queued"
    job_id: str
    position: int
    estimated_wait: float | None


class JobOut(JobStatus, frozen=True, kw_only=True):
    """What is known about one job. ``callback`` is there once it has ended, if it has one."""

    callback: CallbackRecord | None = None


class PushedIn(msgspec.Struct, frozen=True, kw_only=True):
    """How a job ended on its server. Other fields are let be."""

    status: Literal["success", "completed", "done", "failed", "error"]
    result: Raw = msgspec.field(default_factory=lambda: Raw(b"null"))
    error: Any = None
    job_id: Any = None


class TakenOut(msgspec.Struct, frozen=True):
    """The result is with the job's dispatcher."""

    outcome: Literal["taken"] = "taken"


class LateOut(msgspec.Struct, frozen=True):
    """What came for a job after its slot was another's, oldest first."""

    notes: list[Any]


class EndpointIn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model on one server."""

    model: Label
    server: Label


class RegisterIn(EndpointIn, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model on one server, and how much of it that server does at once."""

    endpoint: _Url
    slots: _Slots
    priority: Priority = 5
    reports: bool = True
    together: _Slots | None = None


class EndpointOut(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint at a glance."""

    model: str
    server: str
    endpoint: str
    slots: int
    priority: int
    reports: bool
    together: int | None
    healthy: bool
    draining: bool
    removed: bool
    resting_until: float | None
    free: int
    unassigned: int
    assigned: int
    detached: int
    overdue: int
    last_model: str | None

    @classmethod
    def of(cls, info: EndpointInfo) -> EndpointOut:
        """Put the figures beside what was registered."""
        endpoint = info.endpoint
        return cls(
            model=endpoint.model,
            server=endpoint.server,
            endpoint=endpoint.url,
            slots=endpoint.slots,
            priority=endpoint.priority,
            reports=endpoint.reports,
            together=endpoint.together,
            healthy=info.healthy,
            draining=info.draining,
            removed=info.removed,
            resting_until=info.resting_until,
            free=info.free,
            unassigned=info.unassigned,
            assigned=info.assigned,
            detached=info.detached,
            overdue=info.overdue,
            last_model=info.last_model,
        )


class ModelOut(msgspec.Struct, frozen=True, kw_only=True):
    """A model with its endpoints, in the order in which they were registered."""

    model: str
    queue: str
    slots: int
    usable: bool
    endpoints: list[EndpointOut]

    @classmethod
    def of(cls, view: ModelView) -> ModelOut:
        """Without its configuration."""
        return cls(
            model=view.model,
            queue=view.key,
            slots=view.slots,
            usable=view.usable,
            endpoints=[EndpointOut.of(info) for info in view.endpoints],
        )


class ModelsOut(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A page of models, by name. With ``next`` there are more: ask again, with it as ``after``."""

    models: list[ModelOut]
    next: str | None = None


class Removed(msgspec.Struct, frozen=True):
    """Whether there was such an endpoint."""

    removed: bool


class LetterOut(msgspec.Struct, frozen=True, kw_only=True):
    """A job that was given up."""

    job_id: str
    model: str | None
    reason: str
    error: str | None
    failed_at: float
    attempt: int
    losses: int
    tenant: str | None
    priority: int
    payload: Raw

    @classmethod
    def of(cls, model: str | None, dead_letter: DeadLetter) -> LetterOut:
        """Leave out whom it would have been told to."""
        task = dead_letter.task
        return cls(
            job_id=task.id,
            model=model,
            reason=dead_letter.reason,
            error=dead_letter.history[-1].error if dead_letter.history else None,
            failed_at=dead_letter.failed_at,
            attempt=dead_letter.attempt,
            losses=dead_letter.losses,
            tenant=task.tenant,
            priority=task.priority,
            payload=Raw(task.payload),
        )


class LettersOut(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A page of jobs that were given up. With ``next`` there are more, though the page may be short, or empty."""

    jobs: list[LetterOut]
    next: str | None = None

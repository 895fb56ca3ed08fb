"""The schemas of the dispatcher's requests and responses, from which the OpenAPI document is generated."""

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

    ``expires_in`` and ``delay`` are seconds from now; ``deadline`` and ``not_before`` are Unix seconds. The payload
    is sent to the server byte for byte.
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
        """Return the job as a submission. Its relative times count from ``now``. Raises `InvalidInput`."""
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
    """A job that an upstream queue pushes, with its id in that queue."""

    job_id: Name


class LeasedOut(msgspec.Struct, frozen=True, kw_only=True):
    """The answer for a job that need not wait. ``server`` is null if no server is known to run the job."""

    outcome: Literal["leased"] = "leased"
    job_id: str
    server: str | None


class QueuedOut(msgspec.Struct, frozen=True, kw_only=True):
    """The answer for a job that waits: the number of jobs before it, and the estimated wait in seconds, if known."""

    outcome: Literal["queued"] = "queued"
    job_id: str
    position: int
    estimated_wait: float | None


class JobOut(JobStatus, frozen=True, kw_only=True):
    """The status of one job. If the job has a callback, ``callback`` is present once the job has ended."""

    callback: CallbackRecord | None = None


class PushedIn(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU server's report of how a job ended. Unknown fields are ignored."""

    status: Literal["success", "completed", "done", "failed", "error"]
    result: Raw = msgspec.field(default_factory=lambda: Raw(b"null"))
    error: Any = None
    job_id: Any = None


class TakenOut(msgspec.Struct, frozen=True):
    """The answer for a result that was passed to the job's dispatcher."""

    outcome: Literal["taken"] = "taken"


class LateOut(msgspec.Struct, frozen=True):
    """The reports of a job that were ignored because they arrived too late, oldest first."""

    notes: list[Any]


class EndpointIn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An endpoint: one model on one server."""

    model: Label
    server: Label


class RegisterIn(EndpointIn, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An endpoint (one model on one server), and how many jobs of the model the server runs at once."""

    endpoint: _Url
    slots: _Slots
    priority: Priority = 5
    reports: bool = True
    together: _Slots | None = None


class EndpointOut(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint and the number of its slots in each state."""

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
        """Return the registered fields and the current counts of an endpoint."""
        registered = msgspec.structs.asdict(info.endpoint)
        registered["endpoint"] = registered.pop("url")
        names = cls.__struct_fields__
        return cls(**registered, **{n: getattr(info, n) for n in names if n not in registered})


class ModelOut(msgspec.Struct, frozen=True, kw_only=True):
    """A model, with its endpoints in the order in which they were registered."""

    model: str
    queue: str
    slots: int
    usable: bool
    endpoints: list[EndpointOut]

    @classmethod
    def of(cls, view: ModelView) -> ModelOut:
        """Return the fields of a model and its endpoints, without its configuration."""
        return cls(
            model=view.model,
            queue=view.key,
            slots=view.slots,
            usable=view.usable,
            endpoints=[EndpointOut.of(info) for info in view.endpoints],
        )


class ModelsOut(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A page of models, sorted by name. If there is a ``next``, send it as ``after`` to read the next page."""

    models: list[ModelOut]
    next: str | None = None


class Removed(msgspec.Struct, frozen=True):
    """The answer to a removal: whether the endpoint existed."""

    removed: bool


class LetterOut(msgspec.Struct, frozen=True, kw_only=True):
    """A failed job."""

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
        """Return a dead letter as a failed job, without its callback URL."""
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
    """A page of failed jobs. If there is a ``next``, more jobs may follow, even if this page is short or empty."""

    jobs: list[LetterOut]
    next: str | None = None

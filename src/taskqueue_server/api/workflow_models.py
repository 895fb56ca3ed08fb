"""Bodies of requests and responses for workflows."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Raw

from taskqueue_core.after import OnDead, When
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS
from taskqueue_core.queue import instant
from taskqueue_core.tasks import DEFAULT_PRIORITY, Published
from taskqueue_core.workflows import WorkflowStep
from taskqueue_server.api.task_models import RefIn
from taskqueue_server.routing.schemas import (
    Attempts,
    ContentDigest,
    HeadersField,
    Instant,
    Name,
    Priority,
    Seconds,
    Tags,
    meta_of,
)

_Parents = Annotated[list[str | RefIn], meta_of(maxItems=LIMITS.parents)]


class StepIn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step of a workflow: a task, and what it waits for.

    ``after`` has names of steps, and names of other tasks as objects with ``key`` and ``task_id``. ``{"$input": 0}`` in
    the payload is a reference to the result of the parent at the first position in ``inputs``.
    """

    name: Name
    key: Name
    payload: Raw = msgspec.field(default_factory=lambda: Raw(b"null"))
    headers: HeadersField = {}
    priority: Priority = DEFAULT_PRIORITY
    tenant: Name | None = None
    ordering_key: Name | None = None
    deadline: Instant | None = None
    expires_in: Seconds | None = None
    not_before: Instant | None = None
    delay: Seconds | None = None
    max_attempts: Attempts | None = None
    tags: Tags = ()
    content_digest: ContentDigest | None = None
    after: _Parents = []
    when: When = "done"
    on_dead: OnDead = "hold"
    inputs: list[int] = []

    def to_step(self, now: float, place: int) -> WorkflowStep:
        """Return the checked step. Raises `InvalidInput`, which names the step by its position."""
        try:
            return WorkflowStep(
                name=self.name,
                key=self.key,
                payload=Raw(bytes(self.payload)),
                headers=self.headers,
                priority=self.priority,
                tenant=self.tenant,
                ordering_key=self.ordering_key,
                deadline=instant(now, "expires_in", self.expires_in, "deadline", self.deadline),
                not_before=instant(now, "delay", self.delay, "not_before", self.not_before),
                max_attempts=self.max_attempts,
                tags=self.tags,
                content_digest=self.content_digest,
                after=tuple(
                    each if isinstance(each, str) else each.to_ref(f"steps.{place}.after")
                    for each in self.after
                ),
                when=self.when,
                on_dead=self.on_dead,
                inputs=tuple(self.inputs),
            )
        except InvalidInput as error:
            field = f"steps.{place}.{error.field}"
            raise type(error)(field, error.got, error.allowed) from None


class WorkflowIn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A workflow to publish."""

    steps: Annotated[list[StepIn], meta_of(minItems=1, maxItems=LIMITS.steps)]
    id: Name | None = None


class StepsIn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Steps that a running step adds to its workflow.

    ``by`` is the task of that step. ``after`` has names of steps in this request, and names of other tasks.
    """

    by: RefIn
    steps: Annotated[list[StepIn], meta_of(minItems=1, maxItems=LIMITS.steps)]


class WorkflowConfirmation(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to the publish of a workflow, or of steps that are added to it."""

    id: str
    status: Published


class WorkflowCancelled(msgspec.Struct, frozen=True):
    """Whether the workflow had not ended, and is cancelled now."""

    cancelled: bool

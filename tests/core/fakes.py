"""A scripted backend for tests of core: it records its calls and returns or raises what the test says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from taskqueue_core.backend import Capabilities
from taskqueue_core.tasks import (
    Confirmation,
    Delivery,
    Health,
    Published,
    Settled,
    Task,
)


def accepted(task: Task) -> Confirmation:
    """Return the confirmation of a task that was stored."""
    return Confirmation(key=task.key, task_id=task.id, status=Published.ACCEPTED)


class ScriptedBackend:
    """A backend, publisher and subscription in one: it records every call in order and answers as the test says."""

    def __init__(self, *, atomic_retry: bool = False) -> None:
        self.capabilities = Capabilities(atomic_retry=atomic_retry)
        self.calls: list[tuple[Any, ...]] = []
        self.publish_errors: list[Exception] = []
        """errors that the next calls of the publisher raise, one error for each call"""
        self.answer: Callable[[Task], Confirmation] = accepted
        self.ack_errors: list[Exception] = []
        self.closed = 0

    @property
    def publisher(self) -> ScriptedBackend:
        """Return this object, which is its own publisher."""
        return self

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        """Record the task ids; raise the next of `publish_errors`, if any."""
        self.calls.append(("publish", *(task.id for task in tasks)))
        if self.publish_errors:
            raise self.publish_errors.pop(0)
        return tuple(self.answer(task) for task in tasks)

    async def schedule_retry(
        self,
        task: Task,
        at: float,
        *,
        error: str | None = None,
        token: str | None = None,
        settles: Delivery | None = None,
        free: bool = False,  # noqa: ARG002 - the calls that are recorded are not free
        traceback: str | None = None,  # noqa: ARG002 - not recorded
    ) -> Confirmation:
        """Record the call; raise the next of `publish_errors`, if any."""
        self.calls.append(("schedule_retry", task.id, at, error, token, settles))
        if self.publish_errors:
            raise self.publish_errors.pop(0)
        return self.answer(task)

    def subscribe(self, keys: Iterable[str], consumer: str) -> Any:
        """Record the call; return this object, which is its own subscription."""
        self.calls.append(("subscribe", *keys, consumer))
        return self

    async def ack(self, *deliveries: Delivery, results: Any = ()) -> tuple[Settled, ...]:
        """Record the call; raise the next of `ack_errors`, if any."""
        self.calls.append(("ack", *(delivery.receipt for delivery in deliveries), results))
        if self.ack_errors:
            raise self.ack_errors.pop(0)
        return (Settled.OK,) * len(deliveries)

    def now(self) -> float:
        """Return a constant time."""
        return 1000.0

    async def health(self) -> Health:
        """Return a healthy status."""
        return Health(ok=True, backend="scripted")

    async def aclose(self) -> None:
        """Count the calls to ``aclose``."""
        self.closed += 1

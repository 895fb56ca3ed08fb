"""Backends for tests of core: one that is told what to answer, and one that records."""

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
    """The usual answer to a publish."""
    return Confirmation(key=task.key, task_id=task.id, status=Published.ACCEPTED)


class ScriptedBackend:
    """Notes every call, in order, and answers as it is told. Its retry takes two steps unless said otherwise."""

    def __init__(self, *, atomic_retry: bool = False) -> None:
        """Accept everything."""
        self.capabilities = Capabilities(atomic_retry=atomic_retry)
        self.calls: list[tuple[Any, ...]] = []
        self.publish_errors: list[Exception] = []
        """raised by the next publishes, one each"""
        self.answer: Callable[[Task], Confirmation] = accepted
        self.ack_errors: list[Exception] = []
        self.closed = 0

    @property
    def publisher(self) -> ScriptedBackend:
        """Itself."""
        return self

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        """Note the ids; raise what is due."""
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
    ) -> Confirmation:
        """Note the call; raise what is due."""
        self.calls.append(("schedule_retry", task.id, at, error, token, settles))
        if self.publish_errors:
            raise self.publish_errors.pop(0)
        return self.answer(task)

    def subscribe(self, keys: Iterable[str], consumer: str) -> Any:
        """Give itself."""
        self.calls.append(("subscribe", *keys, consumer))
        return self

    async def ack(self, *deliveries: Delivery, results: Any = ()) -> tuple[Settled, ...]:
        """Note the call; raise what is due."""
        self.calls.append(("ack", *(delivery.receipt for delivery in deliveries), results))
        if self.ack_errors:
            raise self.ack_errors.pop(0)
        return (Settled.OK,) * len(deliveries)

    def now(self) -> float:
        """A fixed time."""
        return 1000.0

    async def health(self) -> Health:
        """Always well."""
        return Health(ok=True, backend="scripted")

    async def aclose(self) -> None:
        """Count."""
        self.closed += 1

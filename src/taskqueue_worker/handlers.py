"""The handlers of a worker, found by the queue and the name of a task."""

from __future__ import annotations

from typing import Any, TypeAlias

from taskqueue_core.application.task_function import TASK_HEADER, TaskFunction
from taskqueue_core.errors import ConfigurationError
from taskqueue_core.limits import LIMITS
from taskqueue_core.protocol.frames import WireTask
from taskqueue_core.tasks import Task

Handler: TypeAlias = TaskFunction[..., Any]


class Handlers:
    """The handlers of a worker."""

    def __init__(self) -> None:
        self._by_name: dict[str, dict[str, Handler]] = {}
        self.timeouts: dict[str, float] = {}
        """by queue, the declared timeouts, for deliveries without a timeout of the store"""

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the queues that have handlers, in the order of registration."""
        return tuple(self._by_name)

    @property
    def all(self) -> tuple[Handler, ...]:
        """All handlers."""
        return tuple(handler for names in self._by_name.values() for handler in names.values())

    @property
    def batches(self) -> tuple[Handler, ...]:
        """The handlers that handle several tasks in one call."""
        return tuple(handler for handler in self.all if handler.options.batch)

    def of(self, task: Task | WireTask) -> Handler | None:
        """Return the handler of a task; ``None`` if there is none.

        In a queue that several tasks share, a header names the task; otherwise the key is its name.
        """
        names = self._by_name.get(task.key)
        if names is None:
            return None
        return names.get(task.headers.get(TASK_HEADER, task.key) if task.headers else task.key)

    def add(self, handler: Handler) -> None:
        """Add a handler. Has no effect if it was added before. Raises `ConfigurationError` if its name is taken."""
        names = self._by_name.get(handler.queue, {})
        known = names.get(handler.name)
        if known is not None and known is not handler:
            raise ConfigurationError(f"the task {handler.name!r} already has a handler")
        if not names and len(self._by_name) >= LIMITS.keys:
            raise ConfigurationError(f"a worker can have at most {LIMITS.keys} queues")
        if not known and (timeout := handler.policies.get("timeout")) is not None:
            self.timeouts[handler.queue] = timeout
        self._by_name[handler.queue] = names | {handler.name: handler}

"""Handles of published tasks for code that is not async."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Generic, TypeVar

from taskqueue_core.application.event_reader import Event, blocking
from taskqueue_core.application.handles import Handle
from taskqueue_core.capabilities import TaskDetail
from taskqueue_core.sync import SyncQueue
from taskqueue_core.tasks import TaskStatus

R_co = TypeVar("R_co", covariant=True)


class SyncHandle(Generic[R_co]):
    """A `Handle` whose methods block until they have a result.

    >>> handle = resize.publish_sync("cat.png")
    >>> handle.result(timeout=30)
    {'width': 320}
    """

    def __init__(self, queue: SyncQueue, handle: Handle[R_co]) -> None:
        """Wrap a handle. ``queue``: the connection whose event loop runs the calls."""
        self.key = handle.key
        self.id = handle.id
        self.confirmation = handle.confirmation
        self._queue = queue
        self._handle = handle

    def __repr__(self) -> str:
        return repr(self._handle)

    def status(self) -> TaskStatus | None:
        """Return the status of the task, as `Handle.status` does."""
        return self._queue.run(self._handle.status())

    def details(self) -> TaskDetail | None:
        """Return all that the store knows of the task, as `Handle.details` does."""
        return self._queue.run(self._handle.details())

    def cancel(self) -> bool:
        """End the task as cancelled, as `Handle.cancel` does."""
        return self._queue.run(self._handle.cancel())

    def reschedule(
        self, *, delay: float | timedelta | None = None, not_before: float | datetime | None = None
    ) -> bool:
        """Let a blocked, waiting or scheduled task run at another time, as `Handle.reschedule` does."""
        return self._queue.run(self._handle.reschedule(delay=delay, not_before=not_before))

    def result(self, timeout: float | None = None, *, wait_for_redrive: bool = False) -> R_co:
        """Wait until the task has ended, and return its result, as `Handle.result` does.

        Raises `WouldBlock` inside a handler if the task has not ended.
        """
        return self._queue.run(self._handle.result(timeout, wait_for_redrive=wait_for_redrive))

    def events(
        self, *, after: str | None = None, channels: Sequence[str] = (), strict: bool = False
    ) -> Iterator[Event]:
        """Yield the events of the task, as `Handle.events` does."""
        events = self._handle.events(after=after, channels=channels, strict=strict)
        return blocking(self._queue.run, events)

    def ticket(self, seconds: int = 600) -> str:
        """Return a ticket for the events of the task, as `Handle.ticket` does."""
        return self._queue.run(self._handle.ticket(seconds))

"""Handles of published tasks: their state, their results, and waiting for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from datetime import datetime, timedelta
from typing import Any, Generic, NoReturn, TypeVar

from msgspec.structs import replace

from taskqueue_core.after import TaskRef
from taskqueue_core.application.encoding import Encoding, readable_error
from taskqueue_core.application.errors import (
    TaskCancelled,
    TaskDead,
    TaskDiscarded,
    TaskExpired,
    TaskFailed,
    UnknownTask,
)
from taskqueue_core.application.event_reader import Event, events_of, ticket_of
from taskqueue_core.application.handler_scope import HANDLER_SCOPE
from taskqueue_core.application.stored_result import result_of
from taskqueue_core.capabilities import TaskDetail, control_of, listing_of
from taskqueue_core.confirmations import stored
from taskqueue_core.errors import InvalidInput, TaskQueueError
from taskqueue_core.limits import kind_of
from taskqueue_core.queue import Queue
from taskqueue_core.task_ends import has_ended
from taskqueue_core.tasks import Confirmation, Failure, State, TaskStatus

R_co = TypeVar("R_co", covariant=True)
S = TypeVar("S")
_ENDS: dict[State, type[TaskFailed]] = {
    State.DEAD: TaskDead,
    State.CANCELLED: TaskCancelled,
    State.EXPIRED: TaskExpired,
    State.DISCARDED: TaskDiscarded,
}
_REASONS: dict[State, str] = {
    State.BLOCKED: "blocked, it waits for other tasks",
    State.WAITING: "waiting, no worker has taken it",
    State.SCHEDULED: "scheduled, it is not due",
    State.IN_FLIGHT: "in_flight, a worker runs it",
    State.DEAD: "dead, it was not redriven",
}
"""why a task has not ended, by its state"""
_LAST_LOOK = 0.5
"""maximum number of seconds for reading the state of a task after the timeout of a wait"""


class Handle(Generic[R_co]):
    """A published task, from the publisher's side. `TaskFunction.publish` and `TaskFunction.handle` create it.

    >>> handle = await resize.publish("cat.png")
    >>> await handle.result(timeout=30)
    {'width': 320}
    """

    __slots__ = ("_encoding", "_queue", "_read", "confirmation", "id", "key")

    def __init__(
        self,
        key: str,
        task_id: str,
        queue: Queue,
        read: Callable[[bytes], R_co],
        confirmation: Confirmation | None = None,
        *,
        encoding: Encoding | None = None,
    ) -> None:
        """Create a handle. ``read`` decodes the result, ``encoding`` the texts of errors."""
        self.key = key
        """name of the queue"""
        self.id = task_id
        """id of the task"""
        self.confirmation = confirmation
        """the answer of the store to the publish; ``None`` if the task was published elsewhere"""
        self._queue = queue
        self._read = read
        self._encoding = encoding

    def __repr__(self) -> str:
        return f"<handle of task {self.id} of {self.key}>"

    @property
    def ref(self) -> TaskRef:
        """The name of the task, for `taskqueue_core.After`.

        >>> handle = await resize.publish("cat.png")
        >>> after = After(tasks=(handle.ref,), when="ended")
        """
        return TaskRef(self.key, self.id)

    async def status(self) -> TaskStatus | None:
        """Return the status of the task; ``None`` if the task is unknown, or its record was deleted after its end.

        >>> status = await handle.status()
        """
        status = await self._queue.status(self.key, self.id)
        return None if status is None else self._readable(status)

    async def details(self) -> TaskDetail | None:
        """Return all that the store knows of the task: its times, worker, failures and tags; ``None`` as in `status`.

        `TaskDetail.task` is the stored task, without its payload and headers if it has ended, or if the token of a
        connection to a server does not permit to see them. Raises `CapabilityMissing` without ``listing``.

        >>> details = await handle.details()
        >>> [failure.error for failure in details.history]
        []
        """
        found = await listing_of(self._queue.backend).task(self.key, self.id)
        if found is None:
            return None
        history = tuple([self._readable_failure(each) for each in found.history])
        return replace(found, status=self._readable(found.status), history=history)

    async def cancel(self) -> bool:
        """End the task as cancelled; if it is running, its handler is stopped. Return False if it had ended before.

        >>> later = await resize.using(delay=60).publish("cat.png")
        >>> await later.cancel()
        True
        """
        return await control_of(self._queue.backend).cancel(self.key, self.id)

    async def reschedule(
        self, *, delay: float | timedelta | None = None, not_before: float | datetime | None = None
    ) -> bool:
        """Let a blocked, waiting or scheduled task run after ``delay``, or at ``not_before``, and not earlier.

        ``delay`` is a number of seconds or a timedelta, ``not_before`` in Unix seconds or a datetime with a time zone.
        Return False if the task is running, has ended or is unknown, or if its attempt was delivered before: what was
        released or redriven comes back at once. Raises `InvalidInput` unless one of the two is given.

        >>> handle = await remind.using(delay=60).publish(17)
        >>> await handle.reschedule(delay=600)
        True
        """
        at = await self._queue.instant("delay", delay, "not_before", not_before)
        if at is None:
            raise InvalidInput("reschedule", "no time", "delay or not_before")
        return await control_of(self._queue.backend).reschedule(self.key, self.id, at)

    async def result(self, timeout: float | None = None, *, wait_for_redrive: bool = False) -> R_co:
        """Wait until the task has ended, and return its result, decoded by the return annotation of its function.

        ``timeout`` is in seconds; ``None`` means no limit. With ``wait_for_redrive``, a dead letter is no end. Raises
        `TaskDead`, `TaskCancelled`, `TaskExpired` or `TaskDiscarded` if the task ended without a result; `UnknownTask`
        or `ResultGone` at once if there is nothing to wait for; `InvalidResult`; and ``TimeoutError``.

        Inside a handler, the worker runs other tasks in its slot while it waits. A wait that could never end raises
        `WouldBlock`.

        >>> await handle.result(timeout=30)
        {'width': 320}
        """
        _check_timeout(timeout)
        if self.confirmation is not None and not self.confirmation.stored:
            stored(self.confirmation)
        status = await self._wait(timeout, wait_for_redrive=wait_for_redrive)
        if status is None:
            raise UnknownTask(
                f"task {self.id} of {self.key} is unknown: it was never published, or its record was deleted"
            )
        if status.state is not State.DONE:
            self._raise(self._readable(status))
        (text,) = await control_of(self._queue.backend).results(self.key, self.id)
        return result_of(self.key, self.id, self._read, text)

    def events(
        self, *, after: str | None = None, channels: Sequence[str] = (), strict: bool = False
    ) -> AsyncGenerator[Event]:
        """Yield what the task streams (`Context.stream`) and what happens to it, while it runs, until it has ended.

        The events begin with the first one that is kept, or follow the event with the id ``after``. With ``channels``,
        only events of the kind ``data`` in these channels are yielded. An event of the kind ``attempt`` says that an
        attempt begins: what earlier attempts have streamed may be repeated. Where events are missing, because a queue
        keeps a limited number, an event of the kind ``trimmed`` has their number; with ``strict`` it raises
        `EventsGone`. Outages of the store or the server are waited out. Raises `UnknownTask`, `Undecodable`, and
        `CapabilityMissing` if the backend keeps no events.

        >>> async for event in handle.events():
        ...     print(event.kind, event.value)
        end done
        """
        queue, encoding = self._queue, self._encoding
        return events_of(queue, self.ref, after, channels, strict=strict, encoding=encoding)

    async def ticket(self, seconds: int = 600) -> str:
        """Return a ticket, with which a browser reads the events of this task, and nothing else, for some seconds.

        The page opens ``/v1/tasks/KEY/ID/events?ticket=TICKET`` of the server: see docs/streaming.md. ``seconds`` is
        from 1 to 86,400. Raises `InvalidInput`, and `CapabilityMissing` unless the connection is one to a server.
        """
        return await ticket_of(self._queue, self.ref, seconds)

    async def _wait(self, timeout: float | None, *, wait_for_redrive: bool) -> TaskStatus | None:
        """Return the status of the task once it has ended. Raises ``TimeoutError``, which names its state."""
        try:
            return await self._end(timeout, wait_for_redrive=wait_for_redrive)
        except TimeoutError as error:
            if timeout is None or isinstance(error, TaskQueueError):  # the latter says more
                raise
        raise await _timeout_of([self], timeout, wait_for_redrive=wait_for_redrive)

    async def _end(self, timeout: float | None, *, wait_for_redrive: bool) -> TaskStatus | None:
        """Return the status of the task once it has ended. A handler that has to wait lends its slot."""
        scope = HANDLER_SCOPE.get()
        async with asyncio.timeout(timeout) as limit:
            if scope is None:
                return await self._queue.ends.wait(
                    self.key, self.id, wait_for_redrive=wait_for_redrive
                )
            status = await self.status()
        if has_ended(status, wait_for_redrive=wait_for_redrive):
            return status
        async with scope.waiting(self._queue, self.key, self.id):
            async with asyncio.timeout_at(limit.when()):
                return await self._queue.ends.wait(
                    self.key, self.id, wait_for_redrive=wait_for_redrive
                )

    def _readable(self, status: TaskStatus) -> TaskStatus:
        """Return a status with decoded texts of errors."""
        failure = status.last_failure
        if failure is not None:
            failure = self._readable_failure(failure)
        error = status.error and readable_error(self._encoding, status.error)
        return replace(status, error=error, last_failure=failure)

    def _readable_failure(self, failure: Failure) -> Failure:
        return replace(failure, error=readable_error(self._encoding, failure.error))

    def _raise(self, status: TaskStatus) -> NoReturn:
        state = status.state
        text = f"task {self.id} of {self.key} is {state}"
        if state is State.DEAD:
            text += f": {status.error}"
            if status.last_failure is not None:
                text += f" ({status.last_failure.error})"
        error = _ENDS[state](text, key=self.key, id=self.id, state=str(state))
        if isinstance(error, TaskDead):
            error.reason, error.attempts = status.error or "", status.attempt
            if status.last_failure is not None:
                error.error = status.last_failure.error
                error.traceback = status.last_failure.traceback
        raise error


def handled_id(confirmation: Confirmation) -> str:
    """Return the id of the task that a publish is about: another one, if that holds the unique key."""
    existing = confirmation.existing_id if confirmation.stored else None
    return existing or confirmation.task_id


async def gather(*handles: Handle[Any], timeout: float | None = None) -> list[Any]:
    """Return the results of several tasks in order. Raises the first error of `Handle.result`, also ``TimeoutError``.

    >>> widths = await gather(*handles, timeout=60)
    """
    _check_timeout(timeout)
    async with _results_of(handles) as waiting:
        _, unfinished = await asyncio.wait(waiting, timeout=timeout) if waiting else ((), ())
        if unfinished:
            raise await _timeout_of(
                [waiting[each] for each in waiting if each in unfinished], timeout
            )
        return [each.result() for each in waiting]


async def as_completed(
    handles: Iterable[Handle[S]], timeout: float | None = None
) -> AsyncIterator[Handle[S]]:
    """Yield handles in the order in which their tasks end, whether they succeed or fail.

    Raises ``TimeoutError`` if some have not ended ``timeout`` seconds after the first handle was asked for.

    >>> async for handle in as_completed(handles):
    ...     print(handle.id, await handle.result())
    cat-320 {'width': 320}
    """
    _check_timeout(timeout)
    loop = asyncio.get_running_loop()
    scope = HANDLER_SCOPE.get()
    end = None if timeout is None else loop.time() + timeout
    async with _results_of(handles) as waiting:
        while waiting:
            remaining = None if end is None else max(0.0, end - loop.time())
            done, _ = await asyncio.wait(
                waiting, timeout=remaining, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                raise await _timeout_of([*waiting.values()], timeout)
            for each in done:
                each.exception()  # the caller gets the error from the handle
                handle = waiting.pop(each)
                async with nullcontext() if scope is None else scope.resumed():
                    yield handle


@asynccontextmanager
async def _results_of(
    handles: Iterable[Handle[S]],
) -> AsyncIterator[dict[asyncio.Task[S], Handle[S]]]:
    """Wait for results in tasks, whose handles are yielded. At the end, cancel the tasks that are still there."""
    waiting = {asyncio.create_task(handle.result()): handle for handle in handles}
    try:
        yield waiting
    finally:
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _check_timeout(timeout: float | None) -> None:
    """Raise `InvalidInput` for a timeout that is no number. One that is negative has passed."""
    number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if timeout is not None and (not number or timeout != timeout):  # noqa: PLR0124 - NaN would confuse asyncio's timers
        raise InvalidInput("timeout", kind_of(timeout), "a number of seconds, or None for no limit")


async def _timeout_of(
    handles: Sequence[Handle[Any]], timeout: float | None, *, wait_for_redrive: bool = False
) -> TimeoutError:
    """Return an error that names the state of the first task. ``handles``: those whose tasks have not ended."""
    first = handles[0]
    text = f"task {first.id} of {first.key} has not ended after {timeout:g} s"
    with suppress(TaskQueueError, TimeoutError):  # without the state, if the store is unavailable
        async with asyncio.timeout(_LAST_LOOK):
            status = await first.status()
        if status is not None and not has_ended(status, wait_for_redrive=wait_for_redrive):
            text += f": {_REASONS[status.state]}"
            text += f"; its last attempt failed: {status.error}" if status.error else ""
    return TimeoutError(text + (f"; and {len(handles) - 1} more" if len(handles) > 1 else ""))

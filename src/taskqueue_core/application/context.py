"""The context of a handler: its delivery, whether the delivery was revoked, and a way to report progress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Generic, Protocol

from typing_extensions import TypeVar

from taskqueue_core.after import TaskRef
from taskqueue_core.application.call import DeclaredTask
from taskqueue_core.application.encoding import Encoding
from taskqueue_core.application.members import batch_before, member_results
from taskqueue_core.application.running_workflow import RunningWorkflow
from taskqueue_core.capabilities import NewEvent
from taskqueue_core.errors import InvalidInput
from taskqueue_core.json_text import encode_json, to_builtins
from taskqueue_core.limits import clean_text, kind_of
from taskqueue_core.protocol.frames import WireDelivery
from taskqueue_core.tasks import Delivery

S_co = TypeVar("S_co", covariant=True, default=object)
R = TypeVar("R")


class EventSink(Protocol):
    """What takes the events that a handler streams. Its methods are thread-safe, and neither block nor raise."""

    def stream(self, receipt: str, event: NewEvent) -> None:
        """Take an event of a delivery. It is dropped if the receipt is not current."""

    def drained(self, receipt: str, callback: Callable[[], None]) -> None:
        """Call ``callback``, from any thread, when all events of the delivery are stored or dropped."""


class Context(Generic[S_co]):
    """What a handler knows about its delivery. Thread-safe.

    ``Context[Pool]`` is a context whose `state` is a ``Pool``, for type checkers.

    >>> @tasks.task
    ... async def report(context: Context, day: int) -> str:
    ...     context.progress(0.5)
    ...     return f"day {day}, attempt {context.attempt}"
    """

    __slots__ = (
        "_delivery",
        "_encoding",
        "_ended",
        "_events",
        "_report",
        "_revoked",
        "_state",
        "_workflow",
    )

    def __init__(
        self,
        delivery: Delivery | WireDelivery,
        report: Callable[[str, float | str], None],
        state: Any = None,
        events: EventSink | None = None,
        encoding: Encoding | None = None,
    ) -> None:
        """Create a context that passes progress to ``report``, a callback that must neither block nor raise.

        ``events`` takes what the handler streams, which ``encoding`` encodes.
        """
        self._delivery = delivery
        self._state: S_co = state
        self._report = report
        self._events = events
        self._encoding = encoding
        self._revoked = False
        self._ended = False
        self._workflow: RunningWorkflow | None = None

    @property
    def task_id(self) -> str:
        """The task's id. Use it to make the handler idempotent: a task may be delivered more than once."""
        return self._delivery.task.id

    @property
    def key(self) -> str:
        """The name of the task's queue."""
        return self._delivery.task.key

    @property
    def attempt(self) -> int:
        """The number of this attempt, starting at 1. A retry increases it; a redelivery does not."""
        return self._delivery.attempt

    @property
    def failures(self) -> int:
        """How many earlier attempts count against the maximum; neither snoozes nor attempts before a redrive do."""
        return max(0, self._delivery.attempt - self._delivery.prior - 1)

    @property
    def losses(self) -> int:
        """How many times this attempt was lost because its worker crashed or stopped responding."""
        return self._delivery.losses

    @property
    def state(self) -> S_co:
        """What the lifespan of the registry yielded in this worker; ``None`` without one. All its tasks share it.

        >>> async def charge(context: Context[Pool], order: int) -> None:
        ...     async with context.state.connection() as connection: ...
        """
        return self._state

    @property
    def workflow(self) -> RunningWorkflow:
        """The workflow that the task is a step of. Raises `InvalidWorkflow` if it is not part of one.

        >>> @tasks.task
        ... async def split(context: Context, image: str) -> None:
        ...     context.workflow.add(resize.call(image, 64))
        """
        if self._workflow is None:
            task = self._delivery.task
            self._workflow = RunningWorkflow.of(TaskRef(task.key, task.id), task.headers)
            if self._ended:
                self._workflow.end()
        return self._workflow

    def results(self, of: DeclaredTask[R]) -> AsyncIterator[tuple[str, R]]:
        """In a callback of a `Batch`, yield the ids and the results of its members, as `Batch.results` does.

        Raises `InvalidInput` in other tasks.

        >>> @tasks.task
        ... async def report(context: Context) -> int:
        ...     return max([size async for _, size in context.results(measure)])
        """
        task = self._delivery.task
        return member_results(of, batch_before(task.id, task.after))

    @property
    def shard(self) -> int | None:
        """The number of the shard that the task came from; ``None`` if the queue has only one shard."""
        return self._delivery.shard

    @property
    def shard_changed(self) -> bool:
        """Whether the connection's previous task from this queue came from another shard, whose data may be cached."""
        return self._delivery.shard_changed

    @property
    def headers(self) -> Mapping[str, str]:
        """The task's headers, read-only."""
        return MappingProxyType(self._delivery.task.headers)

    @property
    def tags(self) -> tuple[str, ...]:
        """The task's tags: those that its declaration has, and those of the publish."""
        return self._delivery.task.tags

    @property
    def deadline(self) -> float | None:
        """The task's deadline in Unix seconds, or ``None``."""
        return self._delivery.task.deadline

    @property
    def revoked(self) -> bool:
        """Whether the delivery no longer belongs to this handler: it was cancelled, lost, timed out or released.

        The handler's result will be discarded. An async handler is cancelled as well; a synchronous handler should
        check this property.
        """
        return self._revoked

    def progress(self, value: float | str) -> None:
        """Report progress: a number from 0 to 1, or text, which is truncated if it is too long. Raises `InvalidInput`.

        Never blocks, so there is nothing to await. If reports follow one another quickly, earlier ones may be skipped.
        """
        if isinstance(value, str):
            self._report(self._delivery.receipt, clean_text(value))
            return
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidInput("progress", kind_of(value), "a number from 0 to 1, or text")
        if not 0 <= value <= 1:
            raise InvalidInput("progress", "a number out of range", "a number from 0 to 1, or text")
        self._report(self._delivery.receipt, float(value))

    def stream(self, value: Any, *, channel: str = "data") -> None:
        """Add an event to the stream of the task, which `Handle.events` reads while the task runs.

        The value is anything that has an equivalent in JSON, of at most 64 KiB as text; a codec of the registry encodes
        it. Raises `InvalidInput` otherwise. Never blocks, and may be called from any thread: the first event is sent at
        once, later ones together, once the store has those that were sent before. If the store is slower than the
        handler, at most 1000 events and 1 MiB wait, and 16 MiB of all tasks of the worker; the oldest ones are left
        out, and a reader gets their number. `drained` waits instead. All events are stored before the outcome of the
        task.

        >>> @tasks.task
        ... async def answer(context: Context, prompt: str) -> str:
        ...     for word in ["as", "you", "like", "it"]:
        ...         context.stream(word)
        ...     return "done"
        """
        encoding = self._encoding
        limit = "event" if encoding is None else "decoded"
        text = encode_json("value", to_builtins(value), limit)
        event = NewEvent(value=text if encoding is None else encoding.result(text), channel=channel)
        if self._events is not None:
            self._events.stream(self._delivery.receipt, event)

    async def drained(self) -> None:
        """Wait until the store has all events that the handler has streamed, or does not take them any more.

        >>> @tasks.task
        ... async def lines(context: Context, count: int) -> None:
        ...     for number in range(count):
        ...         context.stream(f"line {number}")
        ...         await context.drained()
        """
        if self._events is None:
            return
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def end() -> None:
            loop.call_soon_threadsafe(done.set)

        self._events.drained(self._delivery.receipt, end)
        await done.wait()

    def revoke(self) -> None:
        """Set `revoked`. Only the worker calls this."""
        self._revoked = True

    def end(self) -> RunningWorkflow | None:
        """Return the workflow, if the handler has added steps, and accept no more. Only the worker calls this."""
        self._ended = True
        if self._workflow is None:
            return None
        self._workflow.end()
        return self._workflow if self._workflow.steps else None


CONTEXT: ContextVar[Context[Any]] = ContextVar("taskqueue_context")
"""the context of the running handler, while its dependencies open and its middleware runs"""

"""The tasks that the code under test has published, and the messages of failed assertions about them."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from reprlib import Repr
from typing import Any, Generic, TypeVar, cast

import msgspec

from taskqueue_core.application.arguments import Arguments, InvalidPayload
from taskqueue_core.application.errors import InvalidArguments, Undecodable
from taskqueue_core.application.handles import Handle
from taskqueue_core.application.task_function import TASK_HEADER, TaskFunction
from taskqueue_core.backend import Publisher
from taskqueue_core.capabilities import RoomSignals
from taskqueue_core.hooks import hookimpl
from taskqueue_core.policy_model import nearest_first
from taskqueue_core.queue import Queue
from taskqueue_core.tasks import Confirmation, Published, Task
from taskqueue_worker.testing.calls import finish

R = TypeVar("R")
_MAX_LISTED = 20
"""maximum number of tasks that the message of a failed assertion lists"""
_short = Repr()
_short.maxstring = _short.maxother = 80
_BEFORE = 20
"""number of characters that are shown before the first difference of two long values"""


class PublishedTask(msgspec.Struct, Generic[R], frozen=True, kw_only=True):
    """A task that was published.

    >>> (first,) = taskqueue.published(charge)
    >>> first.arguments["order"], first.task.priority
    (17, 5)
    """

    arguments: dict[str, Any]
    """the arguments by name, decoded by the annotations of the function; defaults included"""
    task: Task
    """the stored task: its id, priority, tenant, headers, ``not_before`` and ``deadline``"""
    handle: Handle[R]
    """its handle, for its status and its result"""


class RecordingPublisher:
    """A publisher that records, as a plugin, the tasks that the store accepted."""

    def __init__(
        self,
        inner: Publisher,
        before: Callable[[], Awaitable[None]],
        after: Callable[[], Awaitable[None]],
    ) -> None:
        """Wrap a publisher that does not wait for anything.

        ``before`` is awaited before each call, and ``after`` after one that stored a task.
        """
        self._inner = inner
        self._lock = threading.Lock()
        self._before = before
        self._after = after
        self.schedule_retry = inner.schedule_retry
        self.room_signal = cast("RoomSignals", inner).room_signal
        self.accepted: list[Task] = []
        """the accepted tasks, in order; one that was published again is in it once"""
        self.deadlines: list[float] = []
        """the deadlines of those that have one"""

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        """Publish tasks."""
        await self._before()
        with (
            self._lock
        ):  # a test may publish from several threads, and the store is not thread-safe
            confirmations = finish(self._inner.publish(*tasks))
        if any(confirmation.status is Published.ACCEPTED for confirmation in confirmations):
            await self._after()
        return confirmations

    @hookimpl
    def published(self, tasks: Sequence[Task], confirmations: Sequence[Confirmation]) -> None:
        """Record tasks that were accepted, from a publish or from a schedule."""
        for task, confirmation in zip(tasks, confirmations, strict=True):
            if confirmation.status is Published.ACCEPTED:
                self.accepted.append(task)
                if task.deadline is not None:
                    self.deadlines.append(task.deadline)


def published_of(
    function: TaskFunction[..., R], accepted: Sequence[Task], queue: Queue
) -> list[PublishedTask[R]]:
    """Return the published tasks of one function, in order."""
    return [
        PublishedTask(
            arguments=_arguments(function, task) or {},
            task=task,
            handle=Handle(
                task.key, task.id, queue, function.read_result, encoding=function.encoding
            ),
        )
        for task in accepted
        if task.key == function.queue and name_of(task) == function.name
    ]


def name_of(task: Task) -> str:
    """Return the name of a task: the header of a shared queue, or else its key."""
    return task.headers.get(TASK_HEADER, task.key)


def check_arguments(function: TaskFunction[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raise `InvalidArguments` for a name that no parameter of the task has: it would never match."""
    known = function.arguments.signature.parameters
    open_ended = any(each.kind is each.VAR_KEYWORD for each in known.values())
    if unknown := [name for name in arguments if name not in known and not open_ended]:
        raise InvalidArguments(
            function.name,
            f"{unknown[0]!r} is not a parameter; it has {nearest_first(unknown[0], known) or 'none'}",
            "the names of its parameters",
        )


def matching(
    published: Sequence[PublishedTask[R]], arguments: Mapping[str, Any]
) -> list[PublishedTask[R]]:
    """Return the published tasks that have these arguments; other arguments may have any value."""
    return [each for each in published if not _differences(each, arguments)]


def report(
    what: str,
    accepted: Sequence[Task],
    functions: Mapping[str, TaskFunction[..., Any]],
    published: Sequence[PublishedTask[Any]],
    arguments: Mapping[str, Any],
) -> str:
    """Return the message of a failed assertion: what was expected, the nearest miss, and what was published.

    ``functions`` are the tasks by name, by whose annotations the arguments in ``accepted`` are decoded.
    """
    lines = [what]
    misses = [each for each in published if _differences(each, arguments)]
    if misses:
        nearest = min(misses, key=lambda each: len(_differences(each, arguments)))
        lines.append(f"nearest: {call_text(name_of(nearest.task), nearest.arguments)}")
        lines += [f"  {text}" for text in _differences(nearest, arguments)]
    lines.append(f"published: {'' if accepted else 'nothing'}".rstrip())
    lines += [f"  {_call(task, functions.get(name_of(task)))}" for task in accepted[:_MAX_LISTED]]
    if len(accepted) > _MAX_LISTED:
        lines.append(f"  and {len(accepted) - _MAX_LISTED} more")
    return "\n".join(lines)


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call as text, such as ``shop.charge(order=17)``."""
    return f"{name}({', '.join(f'{key}={_short.repr(value)}' for key, value in arguments.items())})"


def _call(task: Task, function: TaskFunction[..., Any] | None) -> str:
    arguments = None if function is None else _arguments(function, task)
    if arguments is None:
        return f"{name_of(task)} {_short.repr(bytes(task.payload).decode())}"
    return call_text(name_of(task), arguments)


def _differences(published: PublishedTask[Any], arguments: Mapping[str, Any]) -> list[str]:
    found = []
    for name, expected in arguments.items():
        if name not in published.arguments:
            found.append(f"{name}: expected {_short.repr(expected)}, and it has none")
        elif published.arguments[name] != expected:
            shown, got = _contrast(expected, published.arguments[name])
            found.append(f"{name}: expected {shown}, got {got}")
    return found


def _contrast(first: object, second: object) -> tuple[str, str]:
    """Return two different values as short texts that differ, if their whole texts do."""
    shown, other = _short.repr(first), _short.repr(second)
    if shown != other:
        return shown, other
    texts = repr(first), repr(second)
    pairs = enumerate(zip(*texts, strict=False))
    start = max(0, next((at for at, (one, two) in pairs if one != two), 0) - _BEFORE)
    shown, other = (("..." if start else "") + _cut(text[start:]) for text in texts)
    return shown, other


def _cut(text: str) -> str:
    return text if len(text) <= _short.maxstring else text[: _short.maxstring] + "..."


def _arguments(function: TaskFunction[..., Any], task: Task) -> dict[str, Any] | None:
    """Return the arguments of a task, defaults included; ``None`` if its payload does not fit the parameters."""
    known = function.arguments
    defaults = {
        name: parameter.default
        for name, parameter in known.signature.parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    try:
        value = function.read(task)
    except (InvalidPayload, Undecodable):
        return None
    if isinstance(known, Arguments):
        values = defaults | value
        return {
            name: values[name] for name in (*known.signature.parameters, *values) if name in values
        }
    (name,) = known.signature.parameters
    return {name: [value]}

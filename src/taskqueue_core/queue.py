"""The API for applications: publish tasks and read results, on any backend."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from datetime import datetime, timedelta
from functools import cached_property
from types import TracebackType
from typing import Any, NoReturn, cast

import msgspec
from typing_extensions import Unpack

from taskqueue_core.after import TaskRef
from taskqueue_core.assembly import open_backend
from taskqueue_core.authoring.listings import Filters, Query
from taskqueue_core.authoring.unsupported import field_checks
from taskqueue_core.backend import Backend, Capability, Subscription
from taskqueue_core.capabilities import RoomSignal, RoomSignals, control_of
from taskqueue_core.concurrency import gather_all
from taskqueue_core.confirmations import is_absent, retry_hints, stored
from taskqueue_core.errors import ConfigurationError, InvalidInput, PublishUnconfirmed
from taskqueue_core.json_text import encode_json
from taskqueue_core.limits import LIMITS, check_duration
from taskqueue_core.lost_tasks import warn_of_lost_tasks
from taskqueue_core.publish_options import PublishOptions, after_of, instant
from taskqueue_core.publish_order import in_parts, refused_with_parent
from taskqueue_core.queue_lists import OfQueue, TaskList, queue_name
from taskqueue_core.queue_schedules import QueueSchedules
from taskqueue_core.queue_workflows import QueueWorkflows
from taskqueue_core.retry import RetryPolicy
from taskqueue_core.task_ends import TaskEnds
from taskqueue_core.tasks import (
    Confirmation,
    Ledger,
    Published,
    Refusal,
    Task,
    TaskStatus,
    encoded_task,
)
from taskqueue_core.uniqueness import key_of

__all__ = ["PublishOptions", "Queue", "connect", "instant"]

_RESENDS = 3
_PAUSE = RetryPolicy(base=0.05, cap=1.0)
_MIN_RETRY_SECONDS = 0.02
_SIGNAL_SECONDS = 15.0
"""seconds after which a waiting publisher retries even without a notification, which may have been lost"""
_LEDGERS = 100
"""number of ledgers that are read at the same time for their sum"""
_SIGNALLED = {Refusal.QUEUE_FULL, Refusal.TENANT_FULL, Refusal.INTAKE_PAUSED}
"""reasons for a refusal; a `RoomSignal` notifies publishers when one of them may no longer apply"""


class AsyncOnly(AbstractAsyncContextManager["Queue"]):
    """An async context manager that says what to write if it is used without ``async``."""

    def __init__(self, opened: AbstractAsyncContextManager[Queue], name: str) -> None:
        """Wrap a context manager. ``name``: the name of the function that returns it."""
        self._opened = opened
        self._name = name

    async def __aenter__(self) -> Queue:
        return await self._opened.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return await self._opened.__aexit__(kind, error, traceback)

    def __enter__(self) -> NoReturn:
        raise ConfigurationError(
            f"connect is for async code: write 'async with {self._name}(...)', or in code that is not async "
            f"'with {self._name}_sync(...)'"
        )

    def __exit__(self, *error: object) -> None:
        """Do nothing: `__enter__` always raises."""


def connect(backend: str | Backend | None = None) -> AbstractAsyncContextManager[Queue]:
    """Open a `Queue` on a backend.

    If ``backend`` is a name, or ``None`` for the configured backend, that backend is opened, and closed when the
    ``with`` block ends. A backend object that is passed is not closed. If tasks end with a backend that only this
    connection can see, because it is in memory, a warning in the log says so.

    >>> async with connect("taskqueue_memory") as queue:
    ...     confirmation = await queue.publish("mail", {"to": "ada"})
    """
    return AsyncOnly(_connected(backend), "connect")


@asynccontextmanager
async def _connected(backend: str | Backend | None) -> AsyncIterator[Queue]:
    if isinstance(backend, str | None):
        async with aclosing(open_backend(backend)) as opened:
            try:
                yield Queue(opened)
            finally:
                await warn_of_lost_tasks(opened)
    else:
        yield Queue(backend)


class Queue:
    """The API for applications: publish tasks and read results on one backend. Safe for concurrent use.

    >>> async with connect("taskqueue_memory") as queue:
    ...     confirmation = await queue.publish("mail", {"to": "ada"}, priority=7)
    ...     print((await queue.status("mail", confirmation.task_id)).state)
    waiting
    """

    def __init__(self, backend: Backend) -> None:
        """Create a queue on ``backend``, which the caller closes."""
        self.backend = backend
        self._knows_time = False
        self._checks = field_checks(backend.capabilities)

    async def publish(
        self, key: str, payload: object = None, **options: Unpack[PublishOptions]
    ) -> Confirmation:
        """Publish one task and return the store's confirmation (``accepted`` or ``duplicate``).

        ``id`` is unique within the queue, by default a random id. ``priority`` is 0 to 9, by default 5. ``delay`` and
        ``expires_in`` are seconds from now, or a timedelta; ``not_before`` and ``deadline`` are Unix seconds, or a
        datetime with a time zone. The other options are fields of `Task`. If the store's response is lost, the task is
        sent again with the same id. If the queue is full or its intake is paused, publishing is retried for up to
        ``wait`` seconds. Tasks of other publishers may be accepted before this task.

        With ``unique``, at most one task with equal members of the payload is live: a `Unique` names them, a
        `UniqueKey` is the key itself. If another task keeps this one out, or gets its contents, the status is
        ``duplicate`` or ``replaced``, and ``existing_id`` names it. ``debounce`` puts that task off.

        With ``after``, the task waits until other tasks are done: a handle, a `TaskRef`, a list of them, or an `After`,
        which has other conditions.

        Raises `InvalidInput`, `QueueFull`, `NotUnique`, `IdConflict` or `BackendUnavailable` if nothing was stored, and
        `PublishUnconfirmed` if the store does not answer: publish again with the id in the error.
        """
        task = await self.task_of(key, encode_json("payload", payload), options)
        return await self.publish_task(task, wait=options.get("wait", 0))

    async def publish_task(self, task: Task, *, wait: float = 0) -> Confirmation:
        """Publish a task as `publish` does, and raise its errors.

        >>> confirmation = await queue.publish_task(Task(key="mail", payload=b'{"to": "ada"}'))
        """
        end, tasks = _end_of(wait), [task]
        for check in self._checks:
            check(tasks)
        answers: Sequence[Confirmation] = await self._send(tasks)
        if end is not None:
            answers = await self._wait_for_room(tasks, answers, end)
        return stored(answers[0])

    async def instant(
        self, name: str, seconds: float | timedelta | None, other: str, at: float | datetime | None
    ) -> float | None:
        """Return ``at``, or ``seconds`` from now by the store's clock, in Unix seconds; ``None`` if neither is given.

        Raises `InvalidInput`, which uses the names of the two options, if both are given or one is invalid.
        """
        return instant(await self._time() if seconds is not None else 0.0, name, seconds, other, at)

    async def task_of(self, key: str, text: bytes, options: PublishOptions) -> Task:
        """Return the task that `publish` would publish. ``text``: the payload as JSON text, which was checked.

        Raises `InvalidInput`.
        """
        if not options:
            return encoded_task(key, text)
        fields: dict[str, Any] = {**options}
        fields.pop("wait", None)
        for seconds, at in (("delay", "not_before"), ("expires_in", "deadline")):
            if seconds in fields or at in fields:
                given = fields.pop(seconds, None)
                fields[at] = await self.instant(seconds, given, at, fields.get(at))
        if unknown := fields.keys() - PublishOptions.__annotations__.keys():
            allowed = ", ".join(sorted(PublishOptions.__annotations__))
            raise InvalidInput("options", f"an unknown option, {min(unknown)!r}", allowed)
        unique = key_of(fields.pop("unique", None), fields.pop("debounce", None), key, text, fields)
        after = after_of(fields.pop("after", None))
        for name in ("id", "headers"):
            if fields.get(name, "") is None:
                del fields[name]
        return encoded_task(key, text, unique=unique, after=after, **fields)

    async def publish_many(
        self, tasks: Iterable[Task], *, wait: float = 0
    ) -> tuple[Confirmation, ...]:
        """Publish tasks in batches, and return their confirmations in order. A refused task has a confirmation, too.

        A task that waits for an earlier one of the call is published after it; if that one is not stored, it is refused
        with `Refusal.PARENT_REFUSED`. Other tasks are published in their order.

        While a queue is full or its intake is paused, tasks that it refused are published again, for up to ``wait``
        seconds in total: as soon as the backend signals free capacity, or after the delay that the backend suggests.
        """
        end, pending = _end_of(wait), list(tasks)
        for check in self._checks:
            check(pending)
        if len(pending) == 1:  # it waits for no other task of the call
            return tuple(await self._publish_batch(pending, end))
        confirmations: dict[int, Confirmation] = {}
        absent: dict[TaskRef, Confirmation] = {}
        for part in in_parts(pending, LIMITS.batch):
            kept: dict[int, Confirmation] = {}
            if absent:
                found = ((place, refused_with_parent(pending[place], absent)) for place in part)
                kept = {place: refusal for place, refusal in found if refusal is not None}
            places = [place for place in part if place not in kept] if kept else part
            batch = [pending[place] for place in places]
            answers = await self._publish_batch(batch, end) if batch else ()
            confirmations.update(zip(places, answers, strict=True))
            confirmations |= kept
            for place in part:
                answer = confirmations[place]
                if answer.status is not Published.ACCEPTED and is_absent(answer):
                    absent[TaskRef(pending[place].key, pending[place].id)] = answer
        return tuple([confirmations[place] for place in range(len(pending))])

    async def _publish_batch(self, tasks: list[Task], end: float | None) -> Sequence[Confirmation]:
        answers = await self._send(tasks)
        return answers if end is None else await self._wait_for_room(tasks, answers, end)

    async def _wait_for_room(
        self, tasks: list[Task], answers: Iterable[Confirmation], end: float
    ) -> list[Confirmation]:
        confirmations = list(answers)
        hints = retry_hints(confirmations)
        if not hints:
            return confirmations
        async with await self._signal({tasks[hint].key for hint in hints}) as signal:
            # Retry once without waiting, because capacity may have become free before the signal was opened.
            first = signal is not None
            while hints and (remaining := _remaining(end)) > 0:
                if not first:
                    codes = {confirmations[hint].code for hint in hints}
                    await _pause(
                        min(hints.values()), remaining, signal if codes <= _SIGNALLED else None
                    )
                first = False
                answers = await self._send([tasks[hint] for hint in hints])
                for hint, answer in zip(hints, answers, strict=True):
                    confirmations[hint] = answer
                hints = retry_hints(confirmations)
        return confirmations

    async def _signal(self, keys: set[str]) -> AbstractAsyncContextManager[RoomSignal | None]:
        publisher, can = self.backend.publisher, self.backend.capabilities.names
        if Capability.FLOW not in can or not hasattr(publisher, "room_signal"):
            return nullcontext()
        # With fan-out, the full queue may be one of those that receive copies of the tasks.
        if can >= {Capability.FAN_OUT, Capability.CONTROL}:
            control = control_of(self.backend)
            for key in tuple(keys):
                keys.update((await control.settings(key)).bound_to)
        return cast("RoomSignals", publisher).room_signal(*list(keys)[: LIMITS.keys])

    async def _send(self, tasks: list[Task]) -> tuple[Confirmation, ...]:
        for resend in range(1, _RESENDS + 1):
            try:
                return await self.backend.publisher.publish(*tasks)
            except PublishUnconfirmed:
                await asyncio.sleep(_PAUSE.delay(resend))
        try:
            return await self.backend.publisher.publish(*tasks)
        except PublishUnconfirmed as error:
            error.task_id = tasks[0].id
            raise

    def subscribe(self, *keys: str, consumer: str) -> Subscription:
        """Open a subscription directly on the backend, without a server in between."""
        return self.backend.subscribe(keys, consumer)

    async def status(self, key: str, task_id: str) -> TaskStatus | None:
        """Return the status of a task; ``None`` if the task is unknown or its record has expired."""
        return (await control_of(self.backend).statuses(key, task_id))[0]

    async def result(self, key: str, task_id: str) -> Any:
        """Return a task's decoded result; ``None`` if there is no result yet, or if it has expired."""
        (text,) = await control_of(self.backend).results(key, task_id)
        return None if text is None else msgspec.json.decode(text)

    @cached_property
    def ends(self) -> TaskEnds:
        """The waits for the ends of tasks on this connection. Raises `CapabilityMissing` without ``control``."""
        return TaskEnds(control_of(self.backend))

    @cached_property
    def schedules(self) -> QueueSchedules:
        """The schedules in the store.

        >>> status = await queue.schedules.put(Schedule("cats", Every(3600), resize.call("cats.png")))
        >>> [schedule.name for schedule in await queue.schedules.list()]
        ['cats']
        """
        return QueueSchedules(self.backend, self._time, stored)

    @cached_property
    def workflows(self) -> QueueWorkflows:
        """The workflows in the store, as data; `taskqueue_core.Workflow` is the API for declared tasks."""
        return QueueWorkflows(self.backend, self.publish_many, stored)

    def tasks(self, of: str | OfQueue, **filters: Unpack[Filters]) -> TaskList:
        """Return the tasks of a queue, or of the queue of a declared task, that are in ``state`` or have ``tag``.

        The queue's setting ``index`` must name the tag. ``tenant`` and ``worker`` leave out other tasks; a worker is
        known of tasks in flight, of dead letters, and of ended ones with the setting ``keep_ended``. ``since`` and
        ``until``, in Unix seconds, limit the time when tasks ended, became dead letters or become available.
        docs/finding.md shows the order; ``newest`` reverses it. Raises `InvalidInput` and `CapabilityMissing`.

        >>> async for task in queue.tasks("mail", state=State.DEAD, newest=True):
        ...     print(task.task_id, task.error)
        """
        return TaskList(self.backend, Query(key=queue_name(of), **filters))

    async def ledger(self, *keys: str) -> Ledger:
        """Return the sum of the ledgers of the given queues, or of all queues."""
        control = control_of(self.backend)
        total = Ledger()
        names = keys or await control.queues()
        for start in range(0, len(names), _LEDGERS):
            some = map(control.ledger, names[start : start + _LEDGERS])
            total = sum(await gather_all(some), total)
        return total

    async def _time(self) -> float:
        # A remote backend learns the time on the server's clock from the first response.
        if not self._knows_time:
            self._knows_time = (await self.backend.health()).ok
        return self.backend.now()


async def _pause(hint: float, remaining: float, signal: RoomSignal | None) -> None:
    # Add jitter to the suggested delay, so that refused publishers do not all retry at the same moment.
    late = random.uniform(1, 1.5)  # noqa: S311 - this random number is no secret
    if signal is None:
        await asyncio.sleep(min(max(_MIN_RETRY_SECONDS, hint) * late, remaining))
        return
    end = asyncio.get_running_loop().time() + remaining
    await signal.wait(min(max(_SIGNAL_SECONDS, hint) * late, remaining))
    await asyncio.sleep(max(0.0, min(_MIN_RETRY_SECONDS * late, _remaining(end))))


def _end_of(wait: float) -> float | None:
    check_duration("wait", wait)
    return asyncio.get_running_loop().time() + wait if wait else None


def _remaining(end: float) -> float:
    return end - asyncio.get_running_loop().time()

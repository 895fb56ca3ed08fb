"""The exceptions of declared tasks and of their handles.

::

    TaskQueueError
    ├── NotConnected           a declared task was published, or a handle was used, without a connection
    ├── TaskFailed             a task ended without a result
    │   ├── TaskDead           it became a dead letter
    │   ├── TaskCancelled
    │   ├── TaskExpired        its deadline passed
    │   └── TaskDiscarded      its dead letter was discarded
    ├── ResultGone             the task is done, but its result is no longer stored
    ├── UnknownTask            the task was never published, or its record was deleted
    ├── WouldBlock             a handler that waits for a task would wait for ever, or block a thread or a process
    ├── InvalidResult          a result does not match the return annotation of its task
    ├── Undecodable            what a codec has encoded cannot be decoded here
    └── InvalidInput
        └── InvalidArguments   the arguments of a publish do not match the parameters of the task
"""

from __future__ import annotations

from taskqueue_core.errors import InvalidInput, TaskQueueError

__all__ = [
    "EventsGone",
    "InvalidArguments",
    "InvalidResult",
    "NotConnected",
    "ResultGone",
    "TaskCancelled",
    "TaskDead",
    "TaskDiscarded",
    "TaskExpired",
    "TaskFailed",
    "Undecodable",
    "UnknownTask",
    "WouldBlock",
]


class InvalidArguments(InvalidInput):
    """The arguments of a publish do not match the parameters of the task ``field``; ``got`` says which, and why.

    >>> try:
    ...     await resize.publish("cat.png", width="wide")
    ... except InvalidArguments as error:
    ...     print(error)
    shop.resize: ...
    """

    code = "invalid_arguments"

    def __str__(self) -> str:
        return f"{self.field}: {self.got}"


class NotConnected(TaskQueueError):
    """A declared task was published, or a handle was used, without a connection.

    >>> try:
    ...     await Tasks().task(resize.function).publish("cat.png")
    ... except NotConnected as error:
    ...     print(error)
    the task 'resize' needs a connection: ...
    """

    code = "not_connected"


class TaskFailed(TaskQueueError):
    """A task ended without a result. ``key`` and ``id`` identify the task, ``state`` is its state.

    >>> try:
    ...     await (await refund.publish(17)).result()
    ... except TaskFailed as error:
    ...     print(error.key, error.state)
    shop.refund dead
    """

    code = "task_failed"

    def __init__(self, message: str, *, key: str = "", id: str = "", state: str = "") -> None:  # noqa: A002 - same name as in `Task`
        super().__init__(message)
        self.key = key
        self.id = id
        self.state = state


class TaskDead(TaskFailed):
    """A task became a dead letter.

    ``reason`` says why; ``error`` and ``traceback`` are those of its last failure, or ``None``; ``attempts`` is their
    number.

    >>> try:
    ...     await (await refund.publish(17)).result()
    ... except TaskDead as error:
    ...     print(error.reason, error.attempts)
    no_receipt 1
    """

    code = "task_dead"
    reason: str = ""
    error: str | None = None
    traceback: str | None = None
    attempts: int = 0


class TaskCancelled(TaskFailed):
    """A task was cancelled.

    >>> handle = await resize.using(delay=60).publish("cat.png")
    >>> await handle.cancel()
    True
    >>> try:
    ...     await handle.result()
    ... except TaskCancelled as error:
    ...     print(error.state)
    cancelled
    """

    code = "task_cancelled"


class TaskExpired(TaskFailed):
    """The deadline of a task passed before it was executed.

    >>> handle = await resize.using(delay=60, expires_in=0.01).publish("cat.png")
    >>> try:
    ...     await handle.result()
    ... except TaskExpired as error:
    ...     print(error.state)
    expired
    """

    code = "task_expired"


class TaskDiscarded(TaskFailed):
    """A task became a dead letter, which was discarded.

    >>> handle = await refund.publish(17)
    >>> try:
    ...     await handle.result()
    ... except TaskDead:
    ...     discarded = await backend.dead_letters.discard(handle.key, handle.id)
    >>> try:
    ...     await handle.result()
    ... except TaskDiscarded as error:
    ...     print(error.state)
    discarded
    """

    code = "task_discarded"


class ResultGone(TaskQueueError):
    """A task is done, but its result is no longer stored; see the queue's setting ``result_ttl``.

    >>> try:
    ...     await handle.result()
    ... except ResultGone:
    ...     print("executed, but the result is no longer stored")
    {'width': 320}
    """

    code = "result_gone"


class EventsGone(TaskQueueError):
    """Events of a task are not stored any more, and the reader asked for all of them (``strict=True``).

    >>> try:
    ...     async for event in handle.events(strict=True):
    ...         print(event.kind)
    ... except EventsGone as error:
    ...     print(error)
    end
    """

    code = "events_gone"


class UnknownTask(TaskQueueError):
    """There is no such task: it was never published, or its record was deleted after its end.

    >>> try:
    ...     await resize.handle("missing").result()
    ... except UnknownTask as error:
    ...     print(error)
    task missing of shop.resize is unknown: ...
    """

    code = "unknown_task"


class WouldBlock(TaskQueueError):
    """A wait for another task inside a handler could never end, or would block a thread or a process of the worker.

    >>> @tasks.task
    ... async def endless(context: Context) -> str:
    ...     try:
    ...         return await endless.handle(context.task_id).result()
    ...     except WouldBlock as error:
    ...         return str(error)
    >>> async with TestQueue(tasks) as taskqueue:
    ...     handle = await endless.publish()
    ...     drained = await taskqueue.drain()
    ...     print(await handle.result())
    task ... of shop.endless cannot end while this handler waits for it: ...
    """

    code = "would_block"


class InvalidResult(TaskQueueError):
    """A result does not match the return annotation of its task.

    >>> try:
    ...     await handle.result()
    ... except InvalidResult:
    ...     print("the worker has another version of the function")
    {'width': 320}
    """

    code = "invalid_result"


class Undecodable(TaskQueueError):
    """What a codec has encoded cannot be decoded: its key or codec is missing here, or the data is damaged.

    A worker puts such a task off by a minute, up to ten times, and then makes it a dead letter with the reason
    ``undecodable``.

    >>> try:
    ...     Zlib().decode(b"damaged", None)
    ... except Undecodable as error:
    ...     print(error)
    the data is damaged: ...
    """

    code = "undecodable"

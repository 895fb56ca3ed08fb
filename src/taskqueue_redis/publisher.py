"""Publishing tasks and scheduling retries."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Iterable, Sequence
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from taskqueue_core.after import TaskRef
from taskqueue_core.authoring.entries import held_by
from taskqueue_core.authoring.helpers import check_size, checked_keys, refusal
from taskqueue_core.authoring.waits import refused_with_parents
from taskqueue_core.capabilities import Order, QueueSettings
from taskqueue_core.errors import (
    BackendUnavailable,
    LeaseLost,
    PublishUnconfirmed,
)
from taskqueue_core.limits import LIMITS, check_time, clean_traceback
from taskqueue_core.tasks import Confirmation, Delivery, Published, Refusal, Task
from taskqueue_redis.connection.failures import AnswerLost, Refused
from taskqueue_redis.context import RedisContext
from taskqueue_redis.scripts.coalescer import Coalescer, split
from taskqueue_redis.scripts.receipts import parse_receipt
from taskqueue_redis.scripts.runner import Arg, microseconds
from taskqueue_redis.scripts.task_codec import digest, encode, is_plain, name_of, unique_fields
from taskqueue_redis.wakeups import RedisRoomSignal, channel_of

_NO_MEMORY_RETRY_SECONDS = 1.0
_PART = 250
"""maximum number of tasks per script call, so that a call blocks Redis only for a few milliseconds

If the writes of a queue wait for replicas, its batches are divided only if their tasks are large.
"""
_PARTLY = "the store confirmed only part of the batch"
_DUPLICATE = -1
_encoder = msgspec.json.Encoder()
_OF_A_HOLDER = {
    "duplicate": Published.DUPLICATE,
    "replaced": Published.REPLACED,
    "not_unique": Published.REFUSED,
}
"""answers that are followed by the id of the task that holds the unique key"""
_DIGITS = tuple(str(digit).encode() for digit in range(10))


class RedisPublisher:
    """Publisher of the Redis backend. A batch takes one round trip per partition; large batches are sent in parts."""

    def __init__(self, context: RedisContext) -> None:
        self._context = context
        self._scripts = context.scripts
        self._publishes: Coalescer[Task, Confirmation] = Coalescer(self._send)

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        if len(tasks) > 1:
            check_size("tasks", tasks)
        self._context.ensure_open()
        if not self._scripts.promises_checked:
            await self._scripts.check_promises()
        if not tasks:
            return ()
        for task in tasks:
            if task.after is not None:
                return await self._publish_in_order(tasks)
        partitions = self._scripts.partitions
        if len(tasks) == 1 or (len(partitions.names) == 1 and len(tasks) <= LIMITS.batch):
            return tuple(await self._publishes.submit(partitions.of(tasks[0].key), tasks))
        indexes: dict[str, list[int]] = {}
        for index, task in enumerate(tasks):
            indexes.setdefault(partitions.of(task.key), []).append(index)
        batches = [
            (partition, batch[start : start + LIMITS.batch])
            for partition, batch in indexes.items()
            for start in range(0, len(batch), LIMITS.batch)
        ]
        results = await _gather_all(
            self._publishes.submit(partition, [tasks[index] for index in batch])
            for partition, batch in batches
        )
        answers: dict[int, Confirmation] = {}
        for (_, batch), answered in zip(batches, results, strict=True):
            answers.update(zip(batch, answered, strict=True))
        return tuple(answers[index] for index in range(len(tasks)))

    async def _publish_in_order(self, tasks: Sequence[Task]) -> tuple[Confirmation, ...]:
        """Publish tasks so that none is stored before those that precede it, because it may wait for them."""
        answers: list[Confirmation] = []
        for partition, group in groupby(tasks, lambda task: self._scripts.partitions.of(task.key)):
            batch = tuple(group)
            try:
                for start in range(0, len(batch), LIMITS.batch):
                    some = batch[start : start + LIMITS.batch]
                    answers += await self._publishes.submit(partition, some)
            except BackendUnavailable as error:
                if answers:
                    raise PublishUnconfirmed(_PARTLY) from error
                raise
        return tuple(answers)

    async def schedule_retry(
        self,
        task: Task,
        at: float,
        *,
        error: str | None = None,
        token: str | None = None,
        settles: Delivery | None = None,
        free: bool = False,
        traceback: str | None = None,
    ) -> Confirmation:
        check_time("at", at)
        self._context.ensure_open()
        fence, receipt_token, attempt = "", "", 0
        if settles is not None:
            receipt = parse_receipt(settles.receipt)
            if receipt is None:
                raise LeaseLost("the receipt is not current: it was never issued")
            fence, receipt_token, attempt = receipt.fence, receipt.token, settles.attempt
        partition = self._scripts.partitions.of(task.key)
        text = "" if error is None else error[: LIMITS.text]
        envelope = encode(task)
        (answer,) = await self._scripts.run_replicated(
            "schedule_retry", partition, (task.key,),
            task.key, task.id, microseconds(at), token or "",
            "" if error is None else "1", text.encode(errors="replace"),
            fence, receipt_token, attempt,
            digest(task), task.priority, _optional_time(task.deadline), envelope,
            task.tenant or "", task.ordering_key or "", "1" if free else "",
            clean_traceback(traceback) or "", "" if task.unique is None else unique_fields(task, envelope),
            _batch_of(task), msgspec.json.encode(task.tags) if task.tags else "",
        )  # fmt: skip
        if answer == b"lost":
            raise LeaseLost("the receipt is not current: already settled, revoked, or never issued")
        if settles is not None:
            self._context.receipts.forget(settles.receipt)
        status = Published.ACCEPTED if answer == b"accepted" else Published.DUPLICATE
        return Confirmation(key=task.key, task_id=task.id, status=status)

    def room_signal(self, *keys: str) -> RedisRoomSignal:
        self._context.ensure_open()
        partition_of = self._scripts.partitions.of
        channels = (channel_of(partition_of(key), "room", key) for key in checked_keys(keys))
        return RedisRoomSignal(self._context.wakeups, tuple(channels))

    async def sent(self) -> None:
        """Wait until all publishes that were already requested have been answered."""
        await self._publishes.sent()

    async def _send(self, partition: str, tasks: Sequence[Task]) -> Sequence[Confirmation]:
        if len(tasks) == 1:
            return await self._run(partition, tasks, _script_args(tasks))
        # Encode the next part while Redis executes the current one, but send it only afterwards: if the server does not
        # know the script yet and refuses a call, a later part could otherwise be executed before an earlier one.
        replicated = self._scripts.waits_for_replicas(task.key for task in tasks)
        confirmations: list[Confirmation] = []
        running: asyncio.Task[Sequence[Confirmation]] | None = None
        try:
            for part in split(tasks, LIMITS.batch if replicated else _PART, _size):
                args = _script_args(part)
                if len(part) == len(tasks):
                    return await self._run(partition, part, args)
                if running is not None:
                    confirmations += await running
                running = asyncio.create_task(self._run(partition, part, args))
                await asyncio.sleep(0)  # so that this part is sent before the next one is encoded
            if running is not None:
                confirmations += await running
        except BackendUnavailable as error:
            if confirmations:
                raise PublishUnconfirmed(_PARTLY) from error
            raise
        finally:
            if running is not None:
                running.cancel()
        return confirmations

    async def _run(
        self, partition: str, tasks: Sequence[Task], ask: _Ask
    ) -> Sequence[Confirmation]:
        try:
            reply = await self._scripts.run_replicated("publish", partition, ask.keys, *ask.args)
        except BackendUnavailable as error:
            match error.__cause__:
                case AnswerLost() as lost:
                    raise PublishUnconfirmed(str(error), task_id=tasks[0].id) from lost
                case Refused(why="OOM"):
                    return [store_full(task) for task in tasks]
            raise
        if ask.order is None and len(reply) == len(tasks):
            return list(map(confirmation_of, tasks, reply))
        order = ask.order or range(len(tasks))
        answers: dict[int, Confirmation] = {
            place: confirmation_of(tasks[place], answer)
            for place, answer in zip(order, reply, strict=False)
        }
        if rest := order[len(reply) :]:  # the script has left them to the next call
            left = [tasks[place] for place in rest]
            try:
                answers |= zip(
                    rest, await self._run(partition, left, _script_args(left)), strict=True
                )
            except BackendUnavailable as error:
                raise PublishUnconfirmed(_PARTLY) from error
        return [answers[place] for place in range(len(tasks))]


class _Ask(NamedTuple):
    """The arguments of the script ``publish``."""

    keys: Collection[str]
    args: list[Arg]
    order: Sequence[int] | None
    """the positions of the tasks in the order in which they are passed; None if it is that of the call"""


def _size(task: Task) -> int:
    return len(task.payload)


def _script_args(tasks: Sequence[Task]) -> _Ask:
    """Return the arguments of the script ``publish``: the tasks by queue, or in order if one waits for others."""
    key = tasks[0].key
    if len(tasks) == 1 or all(task.key == key for task in tasks):
        return _Ask((key,), [key, len(tasks), *task_args(tasks)], None)
    order: list[int] | None = None
    groups = [(key, list(group)) for key, group in groupby(tasks, attrgetter("key"))]
    if all(task.after is None for task in tasks):
        places: dict[str, list[int]] = {}
        for place, task in enumerate(tasks):
            places.setdefault(task.key, []).append(place)
        order = list(chain.from_iterable(places.values()))
        groups = [(key, [tasks[place] for place in of_key]) for key, of_key in places.items()]
    args: list[Arg] = []
    for key, group in groups:
        args += (key, len(group))
        args += task_args(group)
    return _Ask({key for key, _ in groups}, args, order)


def task_args(tasks: Iterable[Task]) -> list[Arg]:
    """Return the arguments of the Lua function ``publish_tasks`` for tasks: three of each."""
    args: list[Arg] = []
    for task in tasks:
        envelope = encode(task)
        args += (task.id, _descriptor(task, envelope), envelope)
    return args


async def _gather_all(
    calls: Iterable[Awaitable[Sequence[Confirmation]]],
) -> list[Sequence[Confirmation]]:
    """Return the results of concurrent calls. Raises `PublishUnconfirmed` if only some find the store unavailable."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    for failure in failures:
        if not isinstance(failure, BackendUnavailable):
            raise failure
    answers = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
    if failures and answers:
        raise PublishUnconfirmed(_PARTLY) from failures[0]
    if failures:
        raise failures[0]
    return answers


def _descriptor(task: Task, envelope: bytes) -> bytes:
    about = digest(task) + _DIGITS[task.priority]
    if is_plain(envelope):
        return about
    plain = task.tenant is None and task.ordering_key is None
    rare = _rare(task, envelope)
    if plain and task.not_before is None and task.deadline is None and not rare:
        return about
    about += f":{_optional_time(task.not_before)}:{_optional_time(task.deadline)}".encode()
    if not plain:
        about += f"/{task.tenant or ''}/{task.ordering_key or ''}".encode()
    return about + b"\n" + _encoder.encode(rare) if rare else about


def _rare(task: Task, envelope: bytes) -> dict[str, Any] | None:
    """Return the fields that few tasks have, as the Lua function ``rare_of`` reads them."""
    if task.unique is None and task.after is None and task.batch is None and not task.tags:
        return None
    rare: dict[str, Any] = {}
    if task.unique is not None:
        rare["u"] = msgspec.Raw(unique_fields(task, envelope))
    if task.after is not None:
        rare["a"] = len(task.after.tasks)  # the parents are in the envelope
    if task.batch is not None:
        rare["b"] = name_of(task.batch)
    if task.tags:
        rare["t"] = task.tags
    return rare


def _batch_of(task: Task) -> str:
    """Return the name of the batch of a member; empty if it is none."""
    batch = task.batch
    return "" if batch is None or batch == TaskRef(task.key, task.id) else name_of(batch)


def _optional_time(time: float | None) -> int | str:
    return "" if time is None else microseconds(time)


def confirmation_of(task: Task, answer: int | bytes) -> Confirmation:
    """Return the confirmation of a task, from the answer of the Lua function ``publish_tasks``."""
    if isinstance(answer, bytes):
        return _refused(task, answer.decode())
    if answer >= 0:
        return Confirmation(
            key=task.key, task_id=task.id, status=Published.ACCEPTED, position=answer
        )
    status = Published.DUPLICATE if answer == _DUPLICATE else Published.CONFLICT
    return Confirmation(key=task.key, task_id=task.id, status=status)


def _refused(task: Task, text: str) -> Confirmation:
    why, _, where = text.partition("/")
    code, _, rest = why.partition(":")
    if code in _OF_A_HOLDER:
        return held_by(task, _OF_A_HOLDER[code], rest)
    depth, _, bound = rest.partition(":")
    match code:
        case "moved":
            limits, depth = QueueSettings(moved_to=rest), "0"
        case "intake_paused":
            limits, depth = QueueSettings(intake_paused=True), "0"
        case "batch_closed":
            return _batch_closed(task)
        case "too_many_parents":
            return _checked(refused_with_parents(task, int(rest)))
        case "capacity":
            limits = QueueSettings(capacity=int(bound))
        case _:
            limits = QueueSettings(order=Order.FAIR, tenant_capacity=int(bound))
    confirmation = _checked(refusal(task, limits, int(depth), int(depth)))
    if not where:
        return confirmation
    return msgspec.structs.replace(confirmation, reason=f"queue {where!r}: {confirmation.reason}")


def _checked(refused: Confirmation | None) -> Confirmation:
    assert refused is not None  # noqa: S101 - the store refused the task for the same reason
    return refused


def _batch_closed(task: Task) -> Confirmation:
    return Confirmation(
        key=task.key,
        task_id=task.id,
        status=Published.REFUSED,
        code=Refusal.BATCH_CLOSED,
        reason="the batch is closed: it accepts no more members",
    )


def store_full(task: Task) -> Confirmation:
    """Return the refusal of a task for which Redis has no memory left."""
    return Confirmation(
        key=task.key,
        task_id=task.id,
        status=Published.REFUSED,
        code=Refusal.STORE_FULL,
        reason="the store has no memory left",
        retry_after=_NO_MEMORY_RETRY_SECONDS,
    )

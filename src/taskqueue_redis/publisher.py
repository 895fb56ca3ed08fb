"""Putting tasks in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from taskqueue_core.errors import BackendUnavailable, LeaseLost, PublishUnconfirmed
from taskqueue_core.limits import LIMITS, check_time
from taskqueue_core.tasks import Confirmation, Delivery, Published, Task
from taskqueue_redis.coalescing import Coalescer
from taskqueue_redis.envelope import digest, encode
from taskqueue_redis.failures import AnswerLost, Refused
from taskqueue_redis.home import Home
from taskqueue_redis.receipts import readable
from taskqueue_redis.scripts import Word, microseconds
from taskqueue_redis.translation import translated

__all__ = ["RedisPublisher"]

_NO_ROOM_PAUSE = 1.0
_DUPLICATE = -1
_DIGITS = tuple(str(digit).encode() for digit in range(10))


class RedisPublisher:
    """See `taskqueue_core.backend.Publisher`. One round trip per batch and partition."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._scripts = home.scripts
        self._confirming = home.confirming
        self._coalescers: dict[str, Coalescer[Task, Confirmation]] = {}

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        self._home.demand_open()
        if not self._home.promises_checked:
            with translated():
                await self._home.check_promises()
        partitions = self._scripts.partitions
        if len(partitions.names) == 1 or len(tasks) == 1:
            return (
                tuple(await self._coalescer(partitions.of(tasks[0].key)).submit(tasks))
                if tasks
                else ()
            )
        groups: dict[str, list[int]] = {}
        for place, task in enumerate(tasks):
            groups.setdefault(partitions.of(task.key), []).append(place)
        answers: list[Confirmation | None] = [None] * len(tasks)
        for partition, places in groups.items():
            chosen = [tasks[place] for place in places]
            for place, answer in zip(
                places, await self._coalescer(partition).submit(chosen), strict=True
            ):
                answers[place] = answer
        return tuple(answer for answer in answers if answer is not None)

    async def schedule_retry(
        self,
        task: Task,
        at: float,
        *,
        error: str | None = None,
        token: str | None = None,
        settles: Delivery | None = None,
    ) -> Confirmation:
        check_time("at", at)
        self._home.demand_open()
        fence, receipt_token, attempt = "", "", 0
        if settles is not None:
            receipt = readable(settles.receipt)
            if receipt is None:
                raise LeaseLost("the receipt is not current: it was never issued")
            fence, receipt_token, attempt = receipt.fence, receipt.token, settles.attempt
        partition = self._scripts.partitions.of(task.key)
        text = "" if error is None else error[: LIMITS.text]
        with translated():
            answer = await self._confirming.run(
                "schedule_retry", partition, (task.key,),
                task.key, task.id, microseconds(at), token or "",
                "" if error is None else "1", text.encode(errors="replace"),
                fence, receipt_token, attempt,
                digest(task.payload), task.priority, _moment(task.deadline), encode(task),
            )  # fmt: skip
        if answer == b"lost":
            raise LeaseLost(
                "the receipt is not current: settled before, taken back, or never issued"
            )
        if settles is not None:
            self._home.receipts.forget(settles.receipt)
        status = Published.ACCEPTED if answer == b"accepted" else Published.DUPLICATE
        return Confirmation(key=task.key, task_id=task.id, status=status)

    async def sent(self) -> None:
        """Wait until the publishes that were asked for before have been answered."""
        for coalescer in tuple(self._coalescers.values()):
            await coalescer.sent()

    def _coalescer(self, partition: str) -> Coalescer[Task, Confirmation]:
        if partition not in self._coalescers:

            async def send(tasks: Sequence[Task]) -> Sequence[Confirmation]:
                return await self._send(partition, tasks)

            self._coalescers[partition] = Coalescer(send, LIMITS.batch)
        return self._coalescers[partition]

    async def _send(self, partition: str, tasks: Sequence[Task]) -> Sequence[Confirmation]:
        by_key: dict[str, list[int]] = {}
        for place, task in enumerate(tasks):
            by_key.setdefault(task.key, []).append(place)
        words: list[Word] = []
        for key, places in by_key.items():
            words += (key, len(places))
            for place in places:
                task = tasks[place]
                words += (task.id, _about(task), encode(task))
        try:
            with translated(AnswerLost, Refused):
                told = await self._confirming.run("publish", partition, by_key, *words)
        except AnswerLost as error:
            raise PublishUnconfirmed("the store's answer was lost", task_id=tasks[0].id) from error
        except Refused as error:
            if error.why != "OOM":
                raise BackendUnavailable(f"the store takes no writes now: {error.why}") from error
            return [_refused(task) for task in tasks]
        answers: list[Any] = [None] * len(tasks)
        order = (place for places in by_key.values() for place in places)
        for place, answer in zip(order, told, strict=True):
            answers[place] = _confirmation(tasks[place], answer)
        return answers


def _about(task: Task) -> bytes:
    about = digest(task.payload) + _DIGITS[task.priority]
    if task.not_before is None and task.deadline is None:
        return about
    return about + f":{_moment(task.not_before)}:{_moment(task.deadline)}".encode()


def _moment(time: float | None) -> int | str:
    return "" if time is None else microseconds(time)


def _confirmation(task: Task, answer: int) -> Confirmation:
    if answer >= 0:
        return Confirmation(
            key=task.key, task_id=task.id, status=Published.ACCEPTED, position=answer
        )
    status = Published.DUPLICATE if answer == _DUPLICATE else Published.CONFLICT
    return Confirmation(key=task.key, task_id=task.id, status=status)


def _refused(task: Task) -> Confirmation:
    return Confirmation(
        key=task.key,
        task_id=task.id,
        status=Published.REFUSED,
        reason="the store has no memory left",
        retry_after=_NO_ROOM_PAUSE,
    )

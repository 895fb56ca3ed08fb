"""Settling deliveries. Concurrent acks are sent to the store together."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from taskqueue_core.concurrency import gather_all
from taskqueue_core.limits import LIMITS, clean_traceback
from taskqueue_core.tasks import Delivery, Settled
from taskqueue_redis.scripts.coalescer import Coalescer, split
from taskqueue_redis.scripts.receipts import Receipts, parse_receipt
from taskqueue_redis.scripts.runner import Arg, ScriptRunner

T = TypeVar("T")
_AT_ONCE = 500
"""maximum number of acks per script call"""
_ANSWERS = {b"ok": Settled.OK, b"dead": Settled.DEAD, b"lost": Settled.LEASE_LOST}


class _Ack(NamedTuple):
    tail: str
    """the end of the receipt: lane, token and key"""
    known: bool
    """whether this process holds the receipt, so that the script need not check its owner"""
    task_id: str
    fence: str
    result: bytes


def _size(ack: _Ack) -> int:
    return len(ack.result)


class Settlement:
    """Settles deliveries, regardless of which subscription received them."""

    def __init__(self, scripts: ScriptRunner, receipts: Receipts) -> None:
        self._scripts = scripts
        self._receipts = receipts
        self._acks: Coalescer[_Ack, Settled] = Coalescer(self._ack)

    async def ack(
        self, deliveries: Sequence[Delivery], results: Sequence[bytes | None]
    ) -> list[Settled]:
        """Settle deliveries as executed."""
        by_partition: dict[str, tuple[list[int], list[_Ack]]] = {}
        known: dict[str, str | None] = {}
        for index, (delivery, result) in enumerate(zip(deliveries, results, strict=True)):
            head, _, tail = delivery.receipt.partition(".")
            if tail not in known:
                receipt = parse_receipt(delivery.receipt)
                known[tail] = receipt and self._scripts.partitions.of(receipt.key)
            partition = known[tail]
            if partition is None or not head.isdecimal() or not tail.endswith(delivery.task.key):
                continue
            indexes, acks = by_partition.setdefault(partition, ([], []))
            indexes.append(index)
            known_here = self._receipts.is_known(delivery.receipt)
            acks.append(_Ack(tail, known_here, delivery.task.id, head, result or b""))
        return await self._settle(deliveries, by_partition, self._acks.submit)

    async def redeliver(self, deliveries: Sequence[Delivery], loser: str) -> list[Settled]:
        """Release deliveries. If ``loser`` is a consumer's token, count them as lost by that consumer."""
        by_partition: dict[str, tuple[list[int], list[tuple[str, ...]]]] = {}
        for index, delivery in enumerate(deliveries):
            receipt = parse_receipt(delivery.receipt)
            if receipt is None or receipt.key != delivery.task.key:
                continue
            partition = self._scripts.partitions.of(receipt.key)
            indexes, releases = by_partition.setdefault(partition, ([], []))
            indexes.append(index)
            releases.append((receipt.key, delivery.task.id, receipt.fence, receipt.token))

        async def send(partition: str, releases: Sequence[tuple[str, ...]]) -> list[Settled]:
            reply = await self._scripts.run_each("redeliver", partition, (loser,), releases)
            return [_ANSWERS[answer] for answer in reply]

        return await self._settle(deliveries, by_partition, send)

    async def _settle(
        self,
        deliveries: Sequence[Delivery],
        by_partition: Mapping[str, tuple[list[int], list[T]]],
        send: Callable[[str, Sequence[T]], Awaitable[Sequence[Settled]]],
    ) -> list[Settled]:
        """Call ``send`` with the items of each partition. Return the answers in the order of ``deliveries``."""
        answers = [Settled.LEASE_LOST] * len(deliveries)

        async def settle(partition: str, indexes: list[int], items: list[T]) -> None:
            for index, answer in zip(indexes, await send(partition, items), strict=True):
                answers[index] = answer
                self._receipts.forget(deliveries[index].receipt)

        if len(by_partition) == 1:
            ((partition, batch),) = by_partition.items()
            await settle(partition, *batch)
        else:
            await gather_all(settle(name, *batch) for name, batch in by_partition.items())
        return answers

    async def dead_letter(
        self, delivery: Delivery, reason: str, error: str | None, traceback: str | None = None
    ) -> Settled:
        """Make the task of a delivery a dead letter."""
        receipt = parse_receipt(delivery.receipt)
        if receipt is None or receipt.key != delivery.task.key:
            return Settled.LEASE_LOST
        text = "" if error is None else error[: LIMITS.text]
        reply = await self._scripts.run(
            "dead_letter", self._scripts.partitions.of(receipt.key),
            receipt.key, delivery.task.id, receipt.fence, receipt.token,
            reason[: LIMITS.text].encode(errors="replace"),
            "" if error is None else "1", text.encode(errors="replace"), receipt.lane,
            clean_traceback(traceback) or "",
        )  # fmt: skip
        self._receipts.forget(delivery.receipt)
        return _ANSWERS[reply]

    async def settled(self) -> None:
        """Wait until all acks that were already requested have been answered."""
        await self._acks.sent()

    async def _ack(self, partition: str, acks: Sequence[_Ack]) -> Sequence[Settled]:
        if len(acks) == 1:
            return await self._ack_part(partition, acks)
        answers: list[Settled] = []
        for part in split(acks, _AT_ONCE, _size):
            answers += await self._ack_part(partition, part)
        return answers

    async def _ack_part(self, partition: str, acks: Sequence[_Ack]) -> Sequence[Settled]:
        groups: dict[tuple[str, bool], list[int]] = {}
        for index, ack in enumerate(acks):
            groups.setdefault((ack.tail, ack.known), []).append(index)
        args: list[Arg] = []
        for (tail, known), group in groups.items():
            lane, token, key = tail.split(".", 2)
            args += (key, lane, token, int(known), len(group))
            for position in group:
                ack = acks[position]
                args += (ack.task_id, ack.fence, ack.result)
        reply = await self._scripts.run("ack", partition, *args)
        answers = [_ANSWERS[answer] for answer in reply]
        if len(groups) == 1 and len(answers) == len(acks):
            return answers
        order = [index for group in groups.values() for index in group]
        if missing := order[len(reply) :]:  # the script has left them to the next call
            answers += await self._ack_part(partition, [acks[place] for place in missing])
        placed = dict(zip(order, answers, strict=True))
        return [placed[place] for place in range(len(acks))]

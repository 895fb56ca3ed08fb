"""Settling deliveries: acks of concurrent callers go together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from taskqueue_core.concurrency import together
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import Delivery, Settled
from taskqueue_redis.connection.errors import translated
from taskqueue_redis.scripts.coalescer import Coalescer
from taskqueue_redis.scripts.receipts import Receipts, readable
from taskqueue_redis.scripts.runner import Scripts, Word

__all__ = ["Settlements"]

_WORDS = 4
"""that the script ``redeliver`` takes per delivery"""
_ANSWERS = {b"ok": Settled.OK, b"dead": Settled.DEAD, b"lost": Settled.LEASE_LOST}


class _Ack(NamedTuple):
    tail: str
    """of the receipt: lane, token and key"""
    known: bool
    """whether this process has it out, so that nobody can have made it up"""
    task_id: str
    fence: str
    result: bytes


class Settlements:
    """Ends deliveries, whoever owns them."""

    def __init__(self, scripts: Scripts, receipts: Receipts) -> None:
        self._scripts = scripts
        self._receipts = receipts
        self._coalescers: dict[str, Coalescer[_Ack, Settled]] = {}

    async def ack(
        self, deliveries: Sequence[Delivery], results: Sequence[bytes | None]
    ) -> list[Settled]:
        """End deliveries as executed."""
        answers = [Settled.LEASE_LOST] * len(deliveries)
        by_partition: dict[str, tuple[list[int], list[_Ack]]] = {}
        known: dict[str, str | None] = {}
        for place, (delivery, result) in enumerate(zip(deliveries, results, strict=True)):
            head, _, tail = delivery.receipt.partition(".")
            if tail not in known:
                receipt = readable(delivery.receipt)
                known[tail] = receipt and self._scripts.partitions.of(receipt.key)
            partition = known[tail]
            if partition is None or not head.isdecimal() or not tail.endswith(delivery.task.key):
                continue
            places, acks = by_partition.setdefault(partition, ([], []))
            places.append(place)
            known_here = self._receipts.vouches(delivery.receipt)
            acks.append(_Ack(tail, known_here, delivery.task.id, head, result or b""))

        async def settle(partition: str, places: list[int], acks: list[_Ack]) -> None:
            told = await self._coalescer(partition).submit(acks)
            for place, answer in zip(places, told, strict=True):
                answers[place] = answer
                self._receipts.forget(deliveries[place].receipt)

        if len(by_partition) == 1:
            ((partition, some),) = by_partition.items()
            await settle(partition, *some)
        else:
            await together(settle(name, *some) for name, some in by_partition.items())
        return answers

    async def redeliver(self, deliveries: Sequence[Delivery], loser: str) -> list[Settled]:
        """Hand deliveries back; with the token of a ``loser``, as lost by that consumer."""
        answers = [Settled.LEASE_LOST] * len(deliveries)
        by_partition: dict[str, tuple[list[int], list[Word]]] = {}
        for place, delivery in enumerate(deliveries):
            receipt = readable(delivery.receipt)
            if receipt is None or receipt.key != delivery.task.key:
                continue
            partition = self._scripts.partitions.of(receipt.key)
            places, words = by_partition.setdefault(partition, ([], []))
            places.append(place)
            words += (receipt.key, delivery.task.id, receipt.fence, receipt.token)

        async def settle(partition: str, places: list[int], words: list[Word]) -> None:
            told: list[bytes] = []
            for start in range(0, len(words), _WORDS * LIMITS.batch):
                some = words[start : start + _WORDS * LIMITS.batch]
                with translated():
                    told += await self._scripts.run("redeliver", partition, loser, *some)
            for place, answer in zip(places, told, strict=True):
                answers[place] = _ANSWERS[answer]
                self._receipts.forget(deliveries[place].receipt)

        await together(settle(name, *some) for name, some in by_partition.items())
        return answers

    async def dead_letter(self, delivery: Delivery, reason: str, error: str | None) -> Settled:
        """End a delivery among the dead letters."""
        receipt = readable(delivery.receipt)
        if receipt is None or receipt.key != delivery.task.key:
            return Settled.LEASE_LOST
        text = "" if error is None else error[: LIMITS.text]
        with translated():
            told = await self._scripts.run(
                "dead_letter", self._scripts.partitions.of(receipt.key),
                receipt.key, delivery.task.id, receipt.fence, receipt.token,
                reason[: LIMITS.text].encode(errors="replace"),
                "" if error is None else "1", text.encode(errors="replace"), receipt.lane,
            )  # fmt: skip
        self._receipts.forget(delivery.receipt)
        return _ANSWERS[told]

    async def settled(self) -> None:
        """Wait until the acks that were asked for before have been answered."""
        for coalescer in tuple(self._coalescers.values()):
            await coalescer.sent()

    def _coalescer(self, partition: str) -> Coalescer[_Ack, Settled]:
        if partition not in self._coalescers:

            async def send(acks: Sequence[_Ack]) -> Sequence[Settled]:
                return await self._ack(partition, acks)

            self._coalescers[partition] = Coalescer(send, LIMITS.batch)
        return self._coalescers[partition]

    async def _ack(self, partition: str, acks: Sequence[_Ack]) -> Sequence[Settled]:
        groups: dict[tuple[str, bool], list[int]] = {}
        for place, ack in enumerate(acks):
            groups.setdefault((ack.tail, ack.known), []).append(place)
        words: list[Word] = []
        for (tail, known), places in groups.items():
            lane, token, key = tail.split(".", 2)
            words += (key, lane, token, int(known), len(places))
            for place in places:
                ack = acks[place]
                words += (ack.task_id, ack.fence, ack.result)
        with translated():
            told = await self._scripts.run("ack", partition, *words)
        answers = [Settled.LEASE_LOST] * len(acks)
        order = (place for places in groups.values() for place in places)
        for place, answer in zip(order, told, strict=True):
            answers[place] = _ANSWERS[answer]
        return answers

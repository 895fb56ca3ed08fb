"""Receipts, ``<sequence>.<lane>.<token of the consumer>.<key>``, and a table of the receipts held by this process."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple, Protocol

_RECEIPT = re.compile(r"([0-9]{1,17})\.([sr][0-9])\.([0-9a-f]{1,64}-[0-9a-f]{1,32})\.(.{1,200})")


class IssuedReceipt(NamedTuple):
    """The parts of a receipt."""

    fence: str
    """sequence number of the entry in its stream, which is different for each delivery of a task"""
    lane: str
    """``s``, or ``r`` for an entry that was taken back and is redelivered; followed by the priority"""
    token: str
    """token of the consumer that got the delivery; its secret makes the receipts impossible to guess"""
    key: str

    @property
    def text(self) -> str:
        return ".".join(self)


def parse_receipt(receipt: str) -> IssuedReceipt | None:
    """Parse a receipt; return None if its form is invalid."""
    parts = _RECEIPT.fullmatch(receipt)
    return None if parts is None else IssuedReceipt(*parts.groups())


class Consumer(Protocol):
    """The part of an open subscription that the other parts of the backend use."""

    token: str
    keys: tuple[str, ...]
    asleep: bool
    """whether a receive call waits, or will wait if the read in progress returns nothing"""

    async def join(self) -> None:
        """Register with all partitions of the subscription, unless this was done before."""

    async def enter(self, partition: str) -> None:
        """Register with one partition, unless this was done before."""

    async def close(self) -> None:
        """Release all deliveries, and unregister from the store."""

    def wake(self, key: str | None) -> None:
        """Wake a waiting receive call, so that it reads again. ``key``: the queue that has work; None if unknown."""

    def expire(self, token: str) -> None:
        """Register again, because the store no longer has the consumer with ``token``."""

    def revoke(self, receipts: Iterable[str]) -> None:
        """Record that the subscription no longer owns some deliveries."""

    def mark_uncertain(self) -> None:
        """Let the next receive read the deliveries in flight, because the store may have lost its last writes."""


class Receipts:
    """The receipts that consumers of this process hold. Those that another process settles are not deleted here."""

    def __init__(self) -> None:
        self._holders: dict[str, Consumer] = {}
        self._uncertain: set[str] = set()

    def mark_uncertain(self) -> None:
        """Mark all receipts as uncertain, because a failover may have given the deliveries to other consumers."""
        self._uncertain = set(self._holders)

    def is_known(self, receipt: str) -> bool:
        """Return whether this process holds the receipt, and no failover may have made the receipt invalid."""
        return receipt in self._holders and receipt not in self._uncertain

    def add(self, receipt: str, holder: Consumer) -> None:
        self._holders[receipt] = holder

    def forget(self, receipt: str) -> None:
        """Delete the receipt of a delivery that was settled."""
        self._holders.pop(receipt, None)
        self._uncertain.discard(receipt)

    def holds(self, receipt: str) -> bool:
        return receipt in self._holders

    def of(self, holder: Consumer) -> list[str]:
        """Return the receipts of a consumer. Slow, because it searches all receipts."""
        return [receipt for receipt, other in self._holders.items() if other is holder]

    def drop(self, holder: Consumer) -> list[str]:
        """Delete and return the receipts of a consumer."""
        receipts = self.of(holder)
        for receipt in receipts:
            self.forget(receipt)
        return receipts

    def revoke(self, token: str, fence: str, key: str) -> None:
        """Revoke the delivery with this fence and queue key from the consumer with ``token``."""
        head, tail = f"{fence}.", f".{key}"
        for receipt, holder in self._holders.items():
            if holder.token == token and receipt.startswith(head) and receipt.endswith(tail):
                self.forget(receipt)
                holder.revoke([receipt])
                return

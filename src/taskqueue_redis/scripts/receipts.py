"""Receipts: ``<sequence>.<lane>.<token of the consumer>.<key>``, and which of them this process holds."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple, Protocol

_RECEIPT = re.compile(r"([0-9]{1,17})\.([sr][0-9])\.([0-9a-f]{1,64}-[0-9]{1,12})\.(.{1,200})")


class IssuedReceipt(NamedTuple):
    """The parts of a receipt."""

    fence: str
    """the sequence of the stream's entry; each delivery of a task has a different one"""
    lane: str
    """``s`` (first delivery) or ``r`` (returned before), and the priority"""
    token: str
    """of the consumer that it was issued to: random, so that it cannot be guessed"""
    key: str


def parse_receipt(receipt: str) -> IssuedReceipt | None:
    """Parse a receipt; return ``None`` if it cannot have been issued."""
    parts = _RECEIPT.fullmatch(receipt)
    return None if parts is None else IssuedReceipt(parts[1], parts[2], parts[3], parts[4])


class Consumer(Protocol):
    """An open subscription, as the other parts of the backend see it."""

    token: str
    keys: tuple[str, ...]
    asleep: bool
    """whether to wake it: it waits, or will wait unless it finds something now"""

    async def join(self) -> None:
        """Register with the store, if that has not been done."""
        ...

    async def enter(self, partition: str) -> None:
        """Register with a partition, if that has not been done."""
        ...

    async def close(self) -> None:
        """Release every delivery, and leave the store."""
        ...

    def wake(self, key: str | None) -> None:
        """Have a waiting receive look again; ``key`` is known to have work."""
        ...

    def revoke(self, receipts: Iterable[str]) -> None:
        """Note that deliveries are no longer owned."""
        ...

    def mark_uncertain(self) -> None:
        """Read, before the next receive, what the store has in flight here: it may have lost its last writes."""
        ...


class Receipts:
    """The deliveries that consumers of this process hold, also those that another process has settled."""

    def __init__(self) -> None:
        self._holders: dict[str, Consumer] = {}
        self._uncertain: set[str] = set()

    def mark_uncertain(self) -> None:
        """Trust no current receipt any more: a failover may have given the deliveries to other consumers."""
        self._uncertain = set(self._holders)

    def is_known(self, receipt: str) -> bool:
        """Return whether this process holds a receipt, and no failover since can have made it invalid."""
        return receipt in self._holders and receipt not in self._uncertain

    def add(self, receipt: str, holder: Consumer) -> None:
        """Note a delivery."""
        self._holders[receipt] = holder

    def forget(self, receipt: str) -> None:
        """Note that a delivery has been settled."""
        self._holders.pop(receipt, None)
        self._uncertain.discard(receipt)

    def holds(self, receipt: str) -> bool:
        """Return whether this process holds a receipt."""
        return receipt in self._holders

    def of(self, holder: Consumer) -> list[str]:
        """Return what a consumer holds. Slow: it reads all receipts."""
        return [receipt for receipt, other in self._holders.items() if other is holder]

    def drop(self, holder: Consumer) -> list[str]:
        """Forget and return what a consumer holds."""
        receipts = self.of(holder)
        for receipt in receipts:
            self.forget(receipt)
        return receipts

    def revoke_all(self, token: str) -> None:
        """Revoke all deliveries of the consumer with ``token``."""
        for holder in set(self._holders.values()):
            if holder.token == token:
                holder.revoke(self.drop(holder))
                return

    def revoke(self, token: str, fence: str, key: str) -> None:
        """Revoke the delivery of a stream's entry from the consumer with ``token``."""
        head, tail = f"{fence}.", f".{key}"
        for receipt, holder in self._holders.items():
            if holder.token == token and receipt.startswith(head) and receipt.endswith(tail):
                self.forget(receipt)
                holder.revoke([receipt])
                return

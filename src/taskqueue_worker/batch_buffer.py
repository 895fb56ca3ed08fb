"""Deliveries that wait for a call of their batch handler."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from taskqueue_core.protocol.frames import WireDelivery
from taskqueue_core.tasks import Delivery
from taskqueue_worker.handlers import BatchHandler


class BatchBuffer:
    """Forms batches of waiting deliveries: at once, but only full ones while a batch of the same key is running.

    So a single task never waits for others, and under load batches are full without any delay.
    """

    def __init__(self, handlers: Sequence[BatchHandler], concurrency: int) -> None:
        """Limit batches to the number of tasks that may run at once."""
        self._handlers = {handler.key: handler for handler in handlers}
        self._waiting: dict[str, deque[Delivery | WireDelivery]] = {
            key: deque() for key in self._handlers
        }
        self._running: Counter[str] = Counter()
        self._concurrency = concurrency

    def add(
        self, deliveries: Sequence[Delivery | WireDelivery]
    ) -> Sequence[Delivery | WireDelivery]:
        """Add the deliveries that have a batch handler; return the others."""
        others: list[Delivery | WireDelivery] = []
        for delivery in deliveries:
            waiting = self._waiting.get(delivery.task.key)
            (others if waiting is None else waiting).append(delivery)
        return others

    def take(self, room: int) -> tuple[BatchHandler, list[Delivery | WireDelivery]] | None:
        """Return the next batch that may start if ``room`` tasks may start."""
        for key, waiting in self._waiting.items():
            handler = self._handlers[key]
            size = min(handler.size, self._concurrency)
            count = min(len(waiting), room, size)
            if count > 0 and (count == size or not self._running[key]):
                self._waiting[key] = self._waiting.pop(key)  # move to the end: keys take turns
                return handler, [waiting.popleft() for _ in range(count)]
        return None

    def take_all(self) -> list[Delivery | WireDelivery]:
        """Remove and return all waiting deliveries."""
        taken = [delivery for waiting in self._waiting.values() for delivery in waiting]
        for waiting in self._waiting.values():
            waiting.clear()
        return taken

    def forget(self, receipt: str) -> int:
        """Remove a delivery; return how many were removed."""
        dropped = 0
        for key, waiting in self._waiting.items():
            remaining = deque(delivery for delivery in waiting if delivery.receipt != receipt)
            dropped += len(waiting) - len(remaining)
            self._waiting[key] = remaining
        return dropped

    def started(self, handler: BatchHandler) -> None:
        """Note that a batch has started."""
        self._running[handler.key] += 1

    def ended(self, handler: BatchHandler) -> None:
        """Note that a batch has ended."""
        self._running[handler.key] -= 1

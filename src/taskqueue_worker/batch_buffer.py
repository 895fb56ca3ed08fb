"""The buffer for deliveries that wait for a call of their batch handler."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from taskqueue_core.protocol.frames import WireDelivery
from taskqueue_core.tasks import Delivery
from taskqueue_worker.handlers import Handler

AnyDelivery = Delivery | WireDelivery
"""a delivery from a backend, or from a server"""


class BatchBuffer:
    """Deliveries that wait for their batch handlers, grouped by key.

    A batch is full if its size is the handler's batch size or the concurrency, whichever is less. If no batch of a key
    is running, a batch that is not full may start, so that no task waits for more tasks to arrive. While a batch of the
    key is running, only a full batch starts, so that batches are full under load.
    """

    def __init__(self, handlers: Sequence[Handler], concurrency: int) -> None:
        """Create an empty buffer. A batch is never larger than ``concurrency``."""
        self._handlers = {handler.queue: handler for handler in handlers}
        self._waiting: dict[str, deque[AnyDelivery]] = {key: deque() for key in self._handlers}
        self._running: Counter[str] = Counter()
        self._concurrency = concurrency

    def add(self, deliveries: Sequence[AnyDelivery]) -> Sequence[AnyDelivery]:
        """Add the deliveries whose key has a batch handler, and return the remaining deliveries."""
        others: list[AnyDelivery] = []
        for delivery in deliveries:
            waiting = self._waiting.get(delivery.task.key)
            (others if waiting is None else waiting).append(delivery)
        return others

    def take(self, room: int) -> tuple[Handler, list[AnyDelivery]] | None:
        """Remove and return the next batch, of at most ``room`` deliveries; ``None`` if no batch may start now."""
        for key, waiting in self._waiting.items():
            handler = self._handlers[key]
            size = min(handler.options.batch, self._concurrency)
            count = min(len(waiting), room, size)
            if count > 0 and (count == size or not self._running[key]):
                # Move the key to the end, so that keys take turns.
                self._waiting[key] = self._waiting.pop(key)
                return handler, [waiting.popleft() for _ in range(count)]
        return None

    def take_all(self) -> list[AnyDelivery]:
        """Remove and return all waiting deliveries."""
        taken = [delivery for waiting in self._waiting.values() for delivery in waiting]
        for waiting in self._waiting.values():
            waiting.clear()
        return taken

    def forget(self, receipt: str) -> int:
        """Remove the delivery with this receipt. Return 1, or 0 if it is not in the buffer."""
        dropped = 0
        for key, waiting in self._waiting.items():
            remaining = deque(delivery for delivery in waiting if delivery.receipt != receipt)
            dropped += len(waiting) - len(remaining)
            self._waiting[key] = remaining
        return dropped

    def started(self, handler: Handler) -> None:
        """Record that a batch of this handler has started."""
        self._running[handler.queue] += 1

    def ended(self, handler: Handler) -> None:
        """Record that a batch of this handler has ended."""
        self._running[handler.queue] -= 1

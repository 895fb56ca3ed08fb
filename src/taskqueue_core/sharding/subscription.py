"""Receiving from sharded queues: the shard that delivered last is preferred for a while."""

from __future__ import annotations

from msgspec import structs

from taskqueue_core.composite.backend import CompositeBackend, QueuePart
from taskqueue_core.composite.source import Source
from taskqueue_core.composite.subscription import JointSubscription
from taskqueue_core.tasks import Delivery, Received

_STREAK = 10
"""maximum number of consecutive receives that prefer the same shard; after that, all shards take turns again"""
_FAVOURITES = 8
"""maximum number of shards that have subscriptions of their own, so that they can be asked before other shards"""


class ShardedSubscription(JointSubscription):
    """Implementation of `Subscription` for sharded queues."""

    def __init__(self, joint: CompositeBackend, keys: tuple[str, ...], consumer: str) -> None:
        self._favourites: dict[QueuePart, Source] = {}
        self._last: dict[str, int] = {}
        self._served: QueuePart | None = None
        self._streak = 0
        super().__init__(joint, keys, consumer)

    async def receive(self, limit: int, timeout: float | None) -> Received:
        received = await super().receive(limit, timeout)
        if not any(delivery.shard is not None for delivery in received.deliveries):
            return received
        deliveries = tuple([self._was_elsewhere(delivery) for delivery in received.deliveries])
        return structs.replace(received, deliveries=deliveries)

    def _was_elsewhere(self, delivery: Delivery) -> Delivery:
        """Set ``shard_changed`` if the previous delivery of the queue came from another shard."""
        if delivery.shard is None:
            return delivery
        key = delivery.task.key
        last, self._last[key] = self._last.get(key, delivery.shard), delivery.shard
        _, inner = self._composite.to_member(delivery)
        served = QueuePart(0, inner.task.key)
        self._streak = self._streak + 1 if served == self._served else 0
        self._served = served
        return structs.replace(delivery, shard_changed=last != delivery.shard)

    def _alone(self) -> Source | None:
        """Return the source if there is only one, and no shard can be preferred."""
        return None if self._served is not None else super()._alone()

    def _preferred(self) -> list[Source]:
        """Return the source of the shard that delivered last, unless too many receives in a row have preferred it."""
        part = self._served
        if part is None:
            return []
        if self._streak >= _STREAK:
            self._streak = 0
            return []
        source = self._favourites.get(part)
        if source is None or source.retired:
            if len(self._favourites) >= _FAVOURITES:
                self._favourites.pop(next(iter(self._favourites))).retired = True
            source = self._favourites[part] = self.open(0, (part.key,))
            source.aside = True
        return [source]

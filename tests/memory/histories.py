"""Random sequences of operations on a memory backend, and checks of its counters against a full recount."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

from taskqueue_core.capabilities import Order, QueueSettings
from taskqueue_core.clock import ManualClock
from taskqueue_core.rate_limit import RateLimit
from taskqueue_core.tasks import Received, State, Task
from taskqueue_memory import MemoryBackend
from taskqueue_memory.records import QueueState
from taskqueue_memory.tenants import TenantUsage
from tests.memory.test_wakeups import hop

KEYS = (["a", "b", "c"], ["a"], ["b", "a"], ["c"])
FAIR = {"order": Order.FAIR}
ORDERS: tuple[dict[str, Any], ...] = (
    {},
    FAIR,
    {"max_inflight": 2, "floor_share": 0.3},
    {"max_inflight": 1, "rate_limit": RateLimit(max_tokens=2, interval=4)},
    {"paused": True},
    {**FAIR, "tenant_max_inflight": 1, "floor_share": 0.5, "paused_tenants": ("t1",)},
    {**FAIR, "tenant_max_inflight": 2, "tenant_rate_limit": RateLimit(max_tokens=2, interval=4)},
    {**FAIR, "tenant_rate_limit": RateLimit(max_tokens=1), "rate_limit": RateLimit(max_tokens=3)},
    {**FAIR, "tenant_max_inflight": 1, "max_inflight": 2, "max_processing_time": 2.5},
    {**FAIR, "paused": True, "weights": {"t1": 3}},
)
_number = range(4)
_MOVES: dict[str, tuple[int, tuple[Sequence[Any], ...]]] = {
    "put": (4, ("aaab", range(3), (0, 0, 1, 1, 2), _number)),
    "receive": (4, (_number,)),
    "ack": (3, (_number,)),
    "limit": (2, ("aaab", ORDERS)),
    "advance": (2, ((0.5, 1.0, 3.0),)),
    "end": (1, ("aaab", range(10))),
    "stop": (1, (_number,)),
    "close": (1, (_number,)),
    "hand_back": (1, (_number,)),
    "postpone": (1, (_number,)),
    "bury": (1, (_number,)),
    "discard": (1, (_number,)),
    "hop": (2, ()),
}
"""each operation with its relative frequency and the possible values of each argument"""
moves = st.lists(
    st.one_of(
        [
            st.tuples(st.just(move), st.tuples(*map(st.sampled_from, values)))
            for move, (often, values) in _MOVES.items()
            for _ in range(often)
        ]
    ),
    min_size=20,
    max_size=80,
)


def some_moves(source: random.Random, count: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield ``count`` random operations with their arguments, drawn without Hypothesis."""
    often = [move for move, (times, _) in _MOVES.items() for _ in range(times)]
    for move in source.choices(often, k=count):
        yield move, tuple(map(source.choice, _MOVES[move][1]))


class History:
    """A backend with four subscriptions, and the operations that a random sequence can apply to them."""

    def __init__(
        self, backend: MemoryBackend | None = None, clock: ManualClock | None = None
    ) -> None:
        self.clock = clock or ManualClock()
        self.backend = backend or MemoryBackend(clock=self.clock)
        self.subscriptions = [self.backend.subscribe(keys, f"w{n}") for n, keys in enumerate(KEYS)]
        self.receives: dict[int, asyncio.Task[Received]] = {}

    async def move(self, name: str, values: tuple[Any, ...]) -> None:
        """Run the operation with this name."""
        await getattr(self, name)(*values)

    async def hop(self) -> None:
        """Let all woken coroutines run."""
        await hop()

    async def receive(self, number: int) -> None:
        """Start a waiting receive on a subscription, unless it has one already."""
        if number not in self.receives or self.receives[number].done():
            call = self.subscriptions[number].receive(1, None)
            self.receives[number] = asyncio.ensure_future(call)

    async def stop(self, number: int) -> None:
        """Cancel the receive of a subscription."""
        if number in self.receives:
            self.receives[number].cancel()

    async def close(self, number: int) -> None:
        """Close a subscription and replace it by a new one."""
        await self.subscriptions[number].close()
        self.subscriptions[number] = self.backend.subscribe(KEYS[number], f"w{number}")
        self.receives.pop(number, None)

    async def hand_back(self, number: int) -> None:
        """Release all deliveries of a subscription."""
        for record in list(self.subscriptions[number].owned.values()):
            self.backend._store.hand_back(record, lost=False)

    async def ack(self, number: int) -> None:
        """Ack all deliveries of a subscription."""
        for record in list(self.subscriptions[number].owned.values()):
            await self.subscriptions[number].ack(record.delivery)

    async def limit(self, key: str, limits: dict[str, Any]) -> None:
        """Replace the settings of a queue."""
        present = await self.backend.control.settings(key)
        changed = QueueSettings(version=present.version, **limits)
        await self.backend.control.configure(key, changed)

    async def advance(self, seconds: float) -> None:
        """Advance the clock."""
        await self.clock.advance(seconds)

    async def put(self, key: str, tenant: int, entity: int, priority: int) -> None:
        """Publish a task with this tenant, ordering key and priority.

        Priority 3 makes it scheduled, and priority 2 gives it a deadline.
        """
        await self.backend.publisher.publish(
            Task(
                key=key,
                tenant=f"t{tenant}" if tenant else None,
                ordering_key=f"e{entity}" if entity else None,
                priority=priority,
                not_before=self.backend.now() + 1 if priority == 3 else None,
                deadline=self.backend.now() + 2 if priority == 2 else None,
            )
        )

    async def postpone(self, number: int) -> None:
        """Schedule a retry, one second later, for each task that a subscription has in flight."""
        for record in list(self.subscriptions[number].owned.values()):
            await self.backend.publisher.schedule_retry(record.task, self.backend.now() + 1)

    async def bury(self, number: int) -> None:
        """Dead-letter each delivery of a subscription, and redrive the queue after each."""
        for record in list(self.subscriptions[number].owned.values()):
            await self.subscriptions[number].dead_letter(record.delivery, "r")
            await self.backend.dead_letters.redrive(record.task.key)

    async def discard(self, number: int) -> None:
        """Report deliveries of a subscription as lost; dead-letter and discard those that were lost before."""
        for record in list(self.subscriptions[number].owned.values()):
            if not record.losses:
                await self.subscriptions[number].redeliver(record.delivery, lost=True)
            else:
                await self.subscriptions[number].dead_letter(record.delivery, "r")
                await self.backend.dead_letters.discard(record.task.key)

    async def end(self, key: str, number: int) -> None:
        """Cancel the live task at this position of a queue, if there is one."""
        records = self.backend._store.queue(key).records
        live = [task_id for task_id, record in records.items() if record.live]
        for task_id in live[number : number + 1]:
            await self.backend.control.cancel(key, task_id)

    def check(self) -> None:
        """Assert, by scanning all records, that no receive waits on a queue that has a task available."""
        for number, receive in self.receives.items():
            for key in KEYS[number]:
                queue = self.backend._store.queue(key)
                assert receive.done() or not self._may_be_had(queue), f"{number} sleeps on {key}"

    def count(self) -> None:
        """Assert that all counters equal a full recount of the records."""
        for queue in self.backend._store.queues.values():
            live = [record for record in queue.records.values() if record.live]
            waiting = [record for record in live if record.state is State.WAITING]
            assert queue.available == sum(not record.held for record in waiting)
            entities = Counter(r.task.ordering_key for r in live if r.state is not State.SCHEDULED)
            running = Counter(
                r.task.ordering_key for r in live if r.state is not State.SCHEDULED and not r.held
            )
            assert all(running[key] <= 1 for key in entities if key is not None)
            held = {r.task.ordering_key for r in waiting if r.held}
            assert held <= set(queue.turns._holders)
            if queue.fair is None:
                continue
            for account in queue.fair._accounts.values():
                mine = [record for record in live if record.usage is account]
                assert account.fresh == sum(record.counted for record in mine)
                assert account.in_flight == sum(record.seated for record in mine)
                states = Counter(r.state for r in mine if not r.held)
                assert account.waiting == states[State.WAITING]
            waiting_for = [a.waiting for a in queue.fair._accounts.values() if a.resting]
            assert queue.fair.resting == sum(waiting_for)

    def _may_be_had(self, queue: QueueState) -> bool:
        set_to, now = queue.settings, self.backend.now()
        live = [record for record in queue.records.values() if record.live]
        in_flight = sum(record.state is State.IN_FLIGHT for record in live)
        if set_to.paused or (set_to.max_inflight and in_flight >= set_to.max_inflight):
            return False
        if set_to.rate_limit and queue.bucket and not queue.bucket.fill(set_to.rate_limit, now):
            return False
        return any(self._tenant_may(queue, r.usage, now) for r in live if self._free(r))

    @staticmethod
    def _free(record: Any) -> bool:
        return record.state is State.WAITING and not record.held

    @staticmethod
    def _tenant_may(queue: QueueState, account: TenantUsage | None, now: float) -> bool:
        most, rate = queue.settings.tenant_max_inflight, queue.settings.tenant_rate_limit
        if account is None:
            return True
        if account.name in queue.settings.paused_tenants:
            return False
        if most and account.in_flight >= most:
            return False
        return not (rate and account.bucket and not account.bucket.fill(rate, now))

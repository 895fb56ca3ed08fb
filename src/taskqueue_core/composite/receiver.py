"""Receiving from the sources of a composite subscription (its members' subscriptions), in rotation or oldest first."""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import Any

from msgspec import structs

from taskqueue_core.authoring.helpers import SubscriptionBase, checked_limit
from taskqueue_core.composite.backend import CompositeBackend, QueuePart, ReceivePlan
from taskqueue_core.composite.source import Source
from taskqueue_core.errors import BackendUnavailable, SubscriptionClosed, TaskQueueError
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import Delivery, Received

RECEIVE_BACKOFF = 0.05
"""seconds to wait for one source before calling the next one, and before trying again to compute a plan"""
_UNSEEN = 1.0
"""seconds after which deliveries are released if no receive call has returned them"""


class MultiReceiver(SubscriptionBase):
    """The base class of a composite subscription. It opens and retires its sources according to a `ReceivePlan`."""

    def __init__(self, composite: CompositeBackend, keys: tuple[str, ...], consumer: str) -> None:
        self.keys = keys
        self.consumer = consumer
        self.closed = False
        self.sources: list[Source] = []
        self._composite = composite
        self._plan: ReceivePlan | None = None
        self._look_at = 0.0
        self._receiving = False
        self._undoing: asyncio.Task[None] | None = None
        self._scope: asyncio.Timeout | None = None
        self._nudge: asyncio.Future[None] | None = None
        self._grace: asyncio.TimerHandle | None = None
        self._closings: set[asyncio.Task[None]] = set()
        self._follow(composite.first_plan(keys))

    def _follow(self, plan: ReceivePlan) -> None:
        """Open sources for parts of the plan that have no source; retire sources whose parts left the plan."""
        wanted = set(plan.parts)
        covered: set[QueuePart] = set()
        for source in self.sources:
            parts = {QueuePart(source.number, key) for key in source.keys}
            if not source.retired and parts <= wanted:
                covered |= set() if source.aside else parts
            else:
                source.retired = True
                source.give_up_waiting()
        missing: dict[int, list[str]] = {}
        for part in plan.parts:
            if part not in covered:
                missing.setdefault(part.member, []).append(part.key)
        for number, keys in missing.items():
            self._gather_idle(number, keys)
            for start in range(0, len(keys), LIMITS.keys):
                self.open(number, tuple(keys[start : start + LIMITS.keys]))
        for source in [source for source in self.sources if source.retired and source.idle]:
            self.sources.remove(source)
            closing = asyncio.create_task(self._let_go(source))
            self._closings.add(closing)
            closing.add_done_callback(self._closings.discard)

    def _gather_idle(self, number: int, keys: list[str]) -> None:
        """Retire the member's idle sources and add their keys to ``keys``, so that one new source replaces them."""
        for source in self.sources:
            replaceable = source.idle and not (source.retired or source.aside)
            if source.number == number and replaceable:
                source.retired = True
                keys += source.keys

    def open(self, number: int, keys: tuple[str, ...]) -> Source:
        source = Source(self._composite, number, keys, self.consumer)
        self.sources.append(source)
        return source

    async def _let_go(self, source: Source) -> None:
        # A failed close does no harm: all deliveries of the source are settled.
        with contextlib.suppress(TaskQueueError):
            await source.subscription.close()

    async def _refresh_plan(self) -> None:
        """Compute and follow a new plan if the current plan has expired."""
        now = asyncio.get_running_loop().time()
        if self._plan is not None and (self._plan.refresh_seconds is None or now < self._look_at):
            return
        try:
            plan = await self._composite.plan(self.keys)
        except BackendUnavailable:
            if not self.sources:
                raise
            self._look_at = now + RECEIVE_BACKOFF
            return
        self._plan, self._look_at = plan, now + (plan.refresh_seconds or 0)
        if not self.closed:
            self._follow(plan)

    async def receive(self, limit: int, timeout: float | None) -> Received:
        checked_limit(limit)
        if self.closed:
            raise SubscriptionClosed("the subscription is closed")
        end = None if timeout is None else self._composite.now() + timeout
        taken: list[Delivery] = []
        self._receiving = True
        try:
            if self._undoing is not None:  # the deliveries of an earlier receive are being released
                await asyncio.wait({self._undoing}, timeout=_UNSEEN)
            while not self.closed:
                await self._refresh_plan()
                alone = self._alone()
                if alone is None:
                    await self._sweep(limit, taken)
                else:
                    await self._straight(alone, limit, _remaining(end, self._composite.now()))
                    taken += alone.give(limit)
                remaining = _remaining(end, self._composite.now())
                if taken or remaining == 0 or any(source.expired for source in self.sources):
                    break
                if alone is None:
                    await self._wait(limit, remaining)
            return self._received(taken)
        except BaseException:
            self._put_back(taken)
            raise
        finally:
            self._receiving = False
            for source in self.sources:
                source.give_up_waiting()
            self._watch_unseen()

    def _alone(self) -> Source | None:
        """Return the only source if `_straight` can receive from it; otherwise ``None``."""
        if len(self.sources) != 1:
            return None
        (source,) = self.sources
        alone = source.member.needed and source.is_askable and not source.kept
        return source if alone else None

    async def _straight(self, source: Source, limit: int, remaining: float | None) -> None:
        """Receive from a single source, and stop waiting when the plan expires."""
        loop = asyncio.get_running_loop()
        again = None if self._plan is None else self._plan.refresh_seconds
        until = None if again is None or remaining == 0 else max(0.0, self._look_at - loop.time())
        try:
            async with asyncio.timeout(until) as self._scope:
                source.take(await source.subscription.receive(limit, remaining))
        except TimeoutError:
            pass
        except SubscriptionClosed:
            if not self.closed:
                raise
        finally:
            self._scope = None

    def _order(self) -> list[Source]:
        live = [
            source
            for source in self.sources
            if not (source.retired or source.aside) or source.kept or source.question
        ]
        if self._composite.in_turn and len(live) > 1:
            self.sources.append(self.sources.pop(0))
        preferred = self._preferred()
        return preferred + [source for source in live if source not in preferred]

    def _preferred(self) -> list[Source]:
        """Return the sources to receive from before all others."""
        return []

    async def _sweep(self, limit: int, taken: list[Delivery]) -> None:
        order = self._order()
        for source in order:
            if len(taken) >= limit or self.closed:
                break
            if source.question is not None and source.question.cancelling():
                await asyncio.wait({source.question}, timeout=RECEIVE_BACKOFF)
            source.absorb()
            taken += source.give(limit - len(taken))
            if len(taken) < limit and source.is_askable and source.member.needed:
                await self._require_source(source, limit - len(taken))
            elif len(taken) < limit and source.is_askable:
                await asyncio.wait({source.ask(limit - len(taken), 0)}, timeout=RECEIVE_BACKOFF)
                source.absorb()
            taken += source.give(limit - len(taken))
        if taken or self.closed:
            return
        slow = {source.question for source in order if source.question is not None}
        if slow:
            await asyncio.wait(slow, timeout=RECEIVE_BACKOFF, return_when=asyncio.FIRST_COMPLETED)
        for source in order:
            source.absorb()
            taken += source.give(limit - len(taken))
        self._require_any(order)

    async def _require_source(self, source: Source, limit: int) -> None:
        """Receive from a source that is not optional, however long the answer takes."""
        try:
            source.take(await source.subscription.receive(limit, 0))
            source.error = None
        except SubscriptionClosed as error:
            source.error = error

    def _require_any(self, order: list[Source]) -> None:
        errors = [source.error for source in order if source.error is not None]
        if errors and len(errors) == len(order) and not self.closed:
            raise errors[0]

    async def _wait(self, limit: int, remaining: float | None) -> None:
        """Wait until a source answers, the plan expires, or an unavailable member may be called again."""
        for source in self.sources:
            if source.is_askable and not source.aside:
                source.ask(limit, remaining)
        loop = asyncio.get_running_loop()
        dates = [source.member.down_for for source in self.sources if source.member.down_for]
        if self._plan is not None and self._plan.refresh_seconds is not None:
            dates.append(max(0.0, self._look_at - loop.time()))
        questions: set[asyncio.Future[Any]] = {
            source.question for source in self.sources if source.question is not None
        }
        if questions:
            self._nudge = loop.create_future()
            await asyncio.wait(
                {*questions, self._nudge},
                timeout=min(dates, default=None),
                return_when=asyncio.FIRST_COMPLETED,
            )
        else:
            await asyncio.sleep(min(dates, default=RECEIVE_BACKOFF))
        for source in self.sources:
            source.absorb()

    def refresh_now(self) -> None:
        """Make the subscription compute its plan again at once."""
        self._look_at = -math.inf
        if self._scope is not None and self._scope.when() is not None:
            self._scope.reschedule(self._look_at)
        if self._nudge is not None and not self._nudge.done():
            self._nudge.set_result(None)

    def _received(self, taken: list[Delivery]) -> Received:
        if self.closed:
            self._put_back(taken)
            return Received()
        live = [source for source in self.sources if not source.retired]
        dues = [source.due_at for source in live if source.due_at is not None]
        expired = tuple(
            structs.replace(item, key=self._composite.public_name(source.number, item.key))
            for source in self.sources
            for item in source.expired
        )
        for source in self.sources:
            source.expired.clear()
        return Received(
            deliveries=tuple(taken),
            again=any(source.again or source.kept or source.question for source in live),
            due_at=min(dues, default=None) if not taken else None,
            expired=expired,
        )

    def _put_back(self, taken: list[Delivery]) -> None:
        """Release, in the background, the deliveries that a failed or cancelled receive call did not return."""
        for source in self.sources:
            results = set(source.out.values())
            source.take_back([delivery for delivery in taken if delivery.receipt in results])
        taken.clear()
        if not self.closed and any(source.kept or source.question for source in self.sources):
            self._undoing = asyncio.create_task(self._undo())

    async def _undo(self) -> None:
        questions = {source.question for source in self.sources if source.question is not None}
        if questions:
            await asyncio.wait(questions, timeout=_UNSEEN)
        await asyncio.gather(*(self._hand_back(source) for source in self.sources))

    async def _hand_back(self, source: Source) -> None:
        source.absorb()
        deliveries = source.give(len(source.kept))
        inner = [self._composite.to_member(delivery)[1] for delivery in deliveries]
        try:
            if inner:
                await source.subscription.redeliver(*inner)
        except BackendUnavailable:
            source.take_back(deliveries)
            return
        except TaskQueueError:  # the deliveries have already ended
            pass
        for delivery in inner:
            source.out.pop(delivery.receipt, None)

    def _watch_unseen(self) -> None:
        """Start a timer that releases deliveries if no receive call returns them in time."""
        unseen = any(source.kept or source.question for source in self.sources)
        if unseen and self._grace is None and not self.closed:
            loop = asyncio.get_running_loop()
            self._grace = loop.call_later(_UNSEEN, self._end_grace)

    def _end_grace(self) -> None:
        self._grace = None
        if not self._receiving and not self.closed:
            if self._undoing is None or self._undoing.done():
                self._undoing = asyncio.create_task(self._undo())
            self._watch_unseen()


def _remaining(end: float | None, now: float) -> float | None:
    return None if end is None else max(0.0, end - now)

"""The part of the specification that delivers tasks to consumers: which ones a receive returns, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from tests.model.books import Books, Consumer, Name, Record

_BATCH = 16
"""maximum number of tasks that a receive reads at once if their bodies may be large"""
_LARGE_BATCH = 4
"""the same, for returned tasks"""


class Gone(Exception):
    """The consumer is not registered, or was given up."""


class Late(Exception):
    """The receive is older than the consumer's latest list of deliveries, so it is refused."""


class Received(NamedTuple):
    """The answer to a receive."""

    due: int | None
    again: bool
    expired: list[tuple[Name, int]]
    given: list[tuple[Name, Record]]
    left: list[str]
    others: list[str]
    closed: list[tuple[str, int]]


class Deliveries(Books):
    """The specified behaviour of the script `receive`."""

    def __init__(self) -> None:
        super().__init__()
        self.pages: dict[str, int] = {}
        """by queue key, how many tasks the current receive reads at once"""

    def attending(self, token: str, turn: int) -> Consumer:
        """Return the consumer that calls, and record that it is alive."""
        consumer = self.consumers.get(token)
        if consumer is None:
            raise Gone
        if turn < consumer.turn:
            raise Late
        if self.real - consumer.beat > 1_000_000:
            consumer = self.consumers[token] = consumer._replace(beat=self.real)
        return consumer

    def receive(
        self, token: str, turn: int, limit: int, *, look: bool = True,
        asked: Sequence[str] = (), order: Sequence[str] = (),
    ) -> Received:  # fmt: skip
        """Deliver up to ``limit`` tasks; ``order`` is the order in which the store happens to visit keys."""
        consumer = self.attending(token, turn)
        limit = min(limit, 500)
        most = min(limit, 200)
        if self.first_due() <= self.now:
            self.promote_due(250)
            self.settle()
        self.read, self.pages = 0, {}
        due = self.first_due()
        told = Received(int(due) if due < float("inf") else None, False, [], [], [], [], [])  # noqa: FBT003
        candidates: list[str] = []
        seen: set[str] = set()

        def consider(key: str) -> None:
            if key not in seen:
                seen.add(key)
                if self.open.get(key) and self.is_open(key, told):
                    candidates.append(key)

        position = 0
        while position < len(asked) and len(candidates) < most:
            consider(asked[position])
            position += 1
        seen.update(asked[position:])
        told.left.extend(asked[position:])  # too many for one call
        if look or len(candidates) < most:
            place = {key: n for n, key in enumerate(order)}
            ready = [key for key in consumer.keys if self.open.get(key)]
            for key in sorted(ready, key=lambda one: place.get(one, len(place))):
                if len(candidates) < most:
                    consider(key)
                elif key not in seen:
                    told.others.append(key)
        left, candidates = self.share(token, limit, candidates, told)
        told.left.extend(candidates)
        again = bool(told.left or told.others or (left > 0 and told.expired))
        return told._replace(again=again)

    def is_open(self, key: str, told: Received) -> bool:
        """Return whether the queue's limits allow a delivery now; if not, record until when they do not."""
        if not self.terms_of(key).flow.limited:
            return True
        room, opens_at = self.room(key, self.refilled(key))
        if room <= 0:
            told.closed.append((key, opens_at))
        return room > 0

    def share(
        self, token: str, left: int, keys: list[str], told: Received
    ) -> tuple[int, list[str]]:
        """Share the limit ``left`` among queues. Return what remains of it, and the queues that still have tasks."""
        for _ in range(3):
            if left <= 0 or not keys or self.full(told):
                break
            following, unserved, share = list[str](), list[str](), max(1, left // len(keys))
            for key in keys:
                flow = self.refilled(key)
                room = self.room(key, flow)[0] if flow.limited else left
                want = int(min(left, share, room))
                if want <= 0 or self.full(told):
                    unserved.append(key)
                    continue
                given = self.serve(token, key, want, told)
                left -= given
                if flow.max_tokens:
                    flow = flow._replace(tokens=flow.tokens - given)
                    self.terms[key] = self.terms_of(key)._replace(flow=flow)
                is_open = self.open.get(key) and self.is_open(key, told)
                if is_open and (given == want or self.full(told)):
                    following.append(key)
            keys = unserved + following
        return left, keys

    def full(self, told: Received) -> bool:
        """Return whether a receive leaves the rest to the next call."""
        return self.sated or len(told.expired) >= 250

    def serve(self, token: str, key: str, want: int, told: Received) -> int:
        """Deliver from one queue: the highest priority first, returned tasks before others, each lane in its order.

        The tasks of a lane are read in batches; a batch is delivered as a whole, however large its bodies are.
        """
        if want > _BATCH and key not in self.pages:
            self.pages[key] = _BATCH if self.is_costly(key) else want
        names = [(key, one) for one in self.open.get(key, ())]
        names.sort(key=lambda name: self.tasks[name].rank)
        given = 0
        for (_, fresh), group in groupby(names, key=lambda name: self.tasks[name].rank[:2]):
            lane = list(group)
            while lane and given < want and not self.full(told):
                returned = _LARGE_BATCH if self.is_large(key) else _BATCH
                number = min(want - given, self.pages.get(key, _BATCH) if fresh else returned)
                batch, lane = lane[:number], lane[number:]
                if (
                    not fresh
                ):  # the commands take time, and the bodies are moved before they are read
                    self.read += sum(8192 + self.size(name) for name in batch)
                given += sum(self.hand_out(token, name, self.tasks[name], told) for name in batch)
        return given

    def is_large(self, key: str) -> bool:  # noqa: ARG002 - for the subclass that knows bodies
        """Return whether the queue has had large bodies."""
        return False

    def is_costly(self, key: str) -> bool:
        """Return whether few tasks of a queue are read at once: it has had large bodies, or has deadlines."""
        return any(r.live and r.deadline for _, r in self.of(key))

    def hand_out(self, token: str, name: Name, r: Record, told: Received) -> bool:
        """Deliver a task to a consumer; return False if its deadline has passed."""
        key = name[0]
        self.read += self.size(name)
        if r.place == "parked":
            r = r._replace(place="again", fence=self.next_seq(key))
        if r.fresh:
            self.add(key, "fresh", -1)
        self.add(key, "waiting", -1)
        if 0 < r.deadline <= self.now:
            self.finish(name, r, "expired")
            told.expired.append((name, r.attempt))
            return False
        self.put(name, r._replace(owner=token, token=token))
        self.add(key, "in_flight", 1)
        self.add(key, "delivered", 1)
        told.given.append((name, self.tasks[name]))
        return True

# ruff: noqa: ARG002, D102 - each method stands for the one of `Spec` that it breaks
"""Specifications with one deliberate mistake each. All are taken from practice; the exploration must find each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from tests.model.books import Consumer, Name, Record
from tests.model.deliveries import Received
from tests.model.players import Plan, Todo
from tests.model.small import Small, Step
from tests.model.spec import Retry, Spec
from tests.model.terms import Flow
from tests.model.unique import Publish


class AcksFromAnybody(Spec):
    """Mistake: accepts an ack without checking its token."""

    def ack(self, name: Name, fence: int, token: str, *, known: bool = True) -> str:
        return super().ack(name, fence, token, known=True)


class AcksOfLongAgo(Spec):
    """Mistake: accepts an ack without checking its fence."""

    def ack(self, name: Name, fence: int, token: str, *, known: bool = True) -> str:
        return super().ack(name, self.tasks[name].fence or fence, token, known=known)


class ForgetsConsumers(Spec):
    """Mistake: deletes a silent consumer together with its deliveries, as the Redis command XGROUP DELCONSUMER does."""

    def give_up(self, token: str) -> int:
        for name, r in tuple(self.tasks.items()):
            if r.owner == token:
                self.put(name, r._replace(owner="", place=""))
        del self.consumers[token]
        return 0


class RetriesNothing(Spec):
    """Mistake: reports a retry as scheduled without scheduling it."""

    def schedule_retry(self, name: Name, ask: Retry) -> str:
        return "accepted"


class ForgetsRetries(Spec):
    """Mistake: does not remember which retries were scheduled."""

    def schedule_retry(self, name: Name, ask: Retry) -> str:
        answer = super().schedule_retry(name, ask)
        self.put(name, self.tasks[name]._replace(retries=frozenset()))
        return answer


class CountsWaiting(Spec):
    """Mistake: counts an attempt whenever a task waits for capacity."""

    def is_open(self, key: str, told: Received) -> bool:
        if super().is_open(key, told):
            return True
        for task in self.open[key]:
            r = self.tasks[key, task]
            self.put((key, task), r._replace(attempt=r.attempt + 1))
        return False


class ForgetsPlaces(Spec):
    """Mistake: puts a returned task at the end of its lane instead of at its old position."""

    def put_back(self, name: Name, r: Record) -> None:
        self.make_available(name, r._replace(owner="", token=""))


class ForgetsIds(Spec):
    """Mistake: stores a task a second time if it is published again."""

    def publish_one(self, key: str, task: Publish) -> int | str:
        self.tasks.pop((key, task.id), None)
        return super().publish_one(key, task)


class ForgetsSettlements(Spec):
    """Mistake: does not recognise a repeated settlement."""

    def settled_before(self, r: Record, fence: int, verb: str) -> str:
        return "lost"


class FindsNothing(Spec):
    """Mistake: does not report deliveries whose answer to a receive was lost."""

    def pending(self, token: str, turn: int) -> list[tuple[Name, Record]]:
        super().pending(token, turn)
        return []


class TakesLateReceives(Spec):
    """Mistake: delivers tasks to a receive that its caller has cancelled."""

    def attending(self, token: str, turn: int) -> Consumer:
        return super().attending(token, 10**9)


class ForgivesLosses(Spec):
    """Mistake: does not count a loss for the deliveries of a silent consumer."""

    def give_up(self, token: str) -> int:
        return self.take_back(token, lost=False)


class BuriesNobody(Spec):
    """Mistake: redelivers a task without end even if it is lost every time."""

    def hand_back(self, name: Name, r: Record, verb: str, *, lost: bool) -> bool:
        self.terms[name[0]] = self.terms_of(name[0])._replace(max_losses=99)
        return super().hand_back(name, r, verb, lost=lost)


class CancelsHalf(Spec):
    """Mistake: cancels a task in flight but leaves it with its owner."""

    def finish(self, name: Name, r: Record, state: str) -> None:
        super().finish(name, r, state)
        if state == "cancelled":
            self.put(name, self.tasks[name]._replace(owner=r.owner))


class ForgetsDeadlines(Spec):
    """Mistake: checks deadlines only during maintenance."""

    def hand_out(self, token: str, name: Name, r: Record, told: Received) -> bool:
        return super().hand_out(token, name, r._replace(deadline=0), told)


class BeginsAnew(Spec):
    """Mistake: restarts the attempts of a redriven task at one."""

    def redrive(self, name: Name, *, discard: bool = False) -> bool:
        self.put(name, self.tasks[name]._replace(attempt=1))
        return super().redrive(name, discard=discard)


class Hurries(Spec):
    """Mistake: makes scheduled tasks available before they are due."""

    def promote(self, key: str, limit: int = 1000) -> int:
        self.now += 10**9
        promoted = super().promote(key, limit)
        self.now -= 10**9
        return promoted

    def due(self, key: str) -> float:
        return super().due(key) - 10**9


class KeepsLosses(Spec):
    """Mistake: does not reset the number of losses at a retry."""

    def schedule_retry(self, name: Name, ask: Retry) -> str:
        losses = self.tasks[name].losses
        answer = super().schedule_retry(name, ask)
        if answer == "accepted":
            self.put(name, self.tasks[name]._replace(losses=losses))
        return answer


class KnowsNoLimit(Spec):
    """Mistake: ignores the limits of a queue."""

    def room(self, key: str, flow: Flow) -> tuple[float, int]:
        return math.inf, 0


class KnowsNoPriority(Spec):
    """Mistake: delivers tasks in the order they became available, ignoring their priority."""

    def serve(self, token: str, key: str, want: int, told: Received) -> int:
        first = min(self.open.get(key, ()), key=lambda one: self.tasks[key, one].seq)
        return int(self.hand_out(token, (key, first), self.tasks[key, first], told))


class MiscountsFresh(Spec):
    """Mistake: if a task is cancelled before its first delivery, it counts against the capacity for ever."""

    def withdraw(self, name: Name, r: Record) -> Record:
        return super().withdraw(name, r if r.owner else r._replace(handed=r.attempt))


class Hasty(Small):
    """Mistake: a publisher that does not wait for the replica's confirmation."""

    def call(
        self, told: str, act: Callable[[Small], Any], learn: Callable[[Small, Any], None],
        unsure: Callable[[Small], None], *, waits: bool = False,
    ) -> Iterator[Step]:  # fmt: skip
        return super().call(told, act, learn, unsure)


_ACK = Plan(
    (Todo("a", "a1", ("ack",)), Todo("a", "a2", ("ack",)), Todo("b", "b1", ("ack",))), faults=1
)
_RETRY = Plan(
    (Todo("a", "a1", ("ack", "retry", "lost")), Todo("a", "a2", ("ack",), priority=8)), faults=1
)
_DEAD = Plan(
    (Todo("a", "a1", ("bury", "retry"), mortal=True, delayed=True, cancelled=True),), faults=1
)
_BURY = Plan((Todo("a", "a1", ("bury", "retry")),), faults=1)
_BACK = Plan((Todo("a", "a1"), Todo("a", "a2")), faults=1)

MISTAKES: dict[type[Spec], tuple[Plan, str]] = {
    AcksFromAnybody: (_ACK, "R5"),
    AcksOfLongAgo: (_ACK, "R5"),
    ForgetsConsumers: (_ACK, "R1"),
    RetriesNothing: (_RETRY, "R1"),
    ForgetsRetries: (_RETRY, "R4"),
    CountsWaiting: (_ACK._replace(max_inflight=1), "R6"),
    ForgetsPlaces: (_BACK, "R7"),
    ForgetsIds: (_ACK, "R0"),
    ForgetsSettlements: (_ACK, "R4"),
    FindsNothing: (_ACK, "R14"),
    TakesLateReceives: (_ACK, "R14"),
    ForgivesLosses: (_ACK, "R6"),
    BuriesNobody: (_RETRY._replace(max_losses=0), "R1"),
    CancelsHalf: (_DEAD, "R1"),
    ForgetsDeadlines: (_DEAD, "R13"),
    BeginsAnew: (_BURY, "R6"),
    Hurries: (_DEAD, "R9"),
    KeepsLosses: (_RETRY, "R6"),
    KnowsNoLimit: (_ACK._replace(max_inflight=1), "R10"),
    KnowsNoPriority: (_RETRY, "R7"),
    MiscountsFresh: (_DEAD, "R1"),
}
"""for each mistake: a plan in which it shows, and the rule that it breaks"""

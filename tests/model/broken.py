# ruff: noqa: ARG002, D102 - each method stands for the one of `Spec` that it breaks
"""Specifications with one mistake each, all of which have been made somewhere: each must be found out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from tests.model.books import Consumer, Flow, Name, Record
from tests.model.players import Plan, Todo
from tests.model.small import Small, Step
from tests.model.spec import Publish, Received, Retry, Spec


class AcksFromAnybody(Spec):
    """Takes an ack without looking at its token."""

    def ack(self, name: Name, fence: int, token: str, *, known: bool = True) -> str:
        return super().ack(name, fence, token, known=True)


class AcksOfLongAgo(Spec):
    """Takes an ack without looking at its fence."""

    def ack(self, name: Name, fence: int, token: str, *, known: bool = True) -> str:
        return super().ack(name, self.tasks[name].fence or fence, token, known=known)


class ForgetsConsumers(Spec):
    """Forgets a silent consumer with all that it has in flight, as DELCONSUMER does."""

    def give_up(self, token: str) -> int:
        for name, r in tuple(self.tasks.items()):
            if r.owner == token:
                self.put(name, r._replace(owner="", place=""))
        del self.consumers[token]
        return 0


class RetriesNothing(Spec):
    """Says that a retry is scheduled, and does nothing."""

    def schedule_retry(self, name: Name, ask: Retry) -> str:
        return "accepted"


class ForgetsRetries(Spec):
    """Does not remember which retries it has scheduled."""

    def schedule_retry(self, name: Name, ask: Retry) -> str:
        answer = super().schedule_retry(name, ask)
        self.put(name, self.tasks[name]._replace(retries=frozenset()))
        return answer


class CountsWaiting(Spec):
    """Counts an attempt for each wait for capacity."""

    def is_open(self, key: str, told: Received) -> bool:
        if super().is_open(key, told):
            return True
        for task in self.open[key]:
            r = self.tasks[key, task]
            self.put((key, task), r._replace(attempt=r.attempt + 1))
        return False


class ForgetsPlaces(Spec):
    """Puts what is handed back at the end of its lane."""

    def put_back(self, name: Name, r: Record) -> None:
        self.make_available(name, r._replace(owner="", token=""))


class ForgetsIds(Spec):
    """Stores a task again that is published again."""

    def publish_one(self, key: str, task: Publish) -> int | str:
        self.tasks.pop((key, task.id), None)
        return super().publish_one(key, task)


class ForgetsSettlements(Spec):
    """Does not know a settlement again."""

    def settled_before(self, r: Record, fence: int, verb: str) -> str:
        return "lost"


class FindsNothing(Spec):
    """Does not tell a consumer what an answer that was lost has brought."""

    def pending(self, token: str, turn: int) -> list[tuple[Name, Record]]:
        super().pending(token, turn)
        return []


class TakesLateReceives(Spec):
    """Hands out to a receive that its caller has given up."""

    def attending(self, token: str, turn: int) -> Consumer:
        return super().attending(token, 10**9)


class ForgivesLosses(Spec):
    """Does not count what is lost with a silent consumer."""

    def give_up(self, token: str) -> int:
        return self.take_back(token, lost=False)


class BuriesNobody(Spec):
    """Hands out again and again what every consumer dies of."""

    def hand_back(self, name: Name, r: Record, verb: str, *, lost: bool) -> bool:
        self.terms[name[0]] = self.terms_of(name[0])._replace(max_losses=99)
        return super().hand_back(name, r, verb, lost=lost)


class CancelsHalf(Spec):
    """Cancels what is in flight, and leaves it there."""

    def finish(self, name: Name, r: Record, state: str) -> None:
        super().finish(name, r, state)
        if state == "cancelled":
            self.put(name, self.tasks[name]._replace(owner=r.owner))


class ForgetsDeadlines(Spec):
    """Looks at deadlines in its housekeeping alone."""

    def hand_out(self, token: str, name: Name, r: Record, told: Received) -> bool:
        return super().hand_out(token, name, r._replace(deadline=0), told)


class BeginsAnew(Spec):
    """Counts the attempts of what is redriven from one."""

    def redrive(self, name: Name, *, discard: bool = False) -> bool:
        self.put(name, self.tasks[name]._replace(attempt=1))
        return super().redrive(name, discard=discard)


class Hurries(Spec):
    """Makes available what is not due yet."""

    def promote(self, key: str, limit: int = 1000) -> int:
        self.now += 10**9
        promoted = super().promote(key, limit)
        self.now -= 10**9
        return promoted

    def due(self, key: str) -> float:
        return super().due(key) - 10**9


class KeepsLosses(Spec):
    """Does not begin the losses anew with a retry."""

    def schedule_retry(self, name: Name, ask: Retry) -> str:
        losses = self.tasks[name].losses
        answer = super().schedule_retry(name, ask)
        if answer == "accepted":
            self.put(name, self.tasks[name]._replace(losses=losses))
        return answer


class KnowsNoLimit(Spec):
    """Hands out whatever is asked for."""

    def room(self, key: str, flow: Flow) -> tuple[float, int]:
        return math.inf, 0


class KnowsNoPriority(Spec):
    """Hands out in the order in which tasks became available, whatever their priority."""

    def serve(self, token: str, key: str, want: int, told: Received) -> int:
        first = min(self.open.get(key, ()), key=lambda one: self.tasks[key, one].seq)
        return int(self.hand_out(token, (key, first), self.tasks[key, first], told))


class MiscountsFresh(Spec):
    """Counts what was cancelled before its first hand-out against the capacity for ever."""

    def withdraw(self, name: Name, r: Record) -> Record:
        return super().withdraw(name, r if r.owner else r._replace(handed=r.attempt))


class Hasty(Small):
    """A publisher that does not wait for the replica."""

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
"""by mistake: a plan that brings it to light, and the rule that it breaks"""

"""The laws that must hold in every state and at every step, checked from the store's answers alone.

For each task a `Fate` records what must have become of it if every answer was true. The rules have the same numbers as
in the checker of the chaos tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from tests.model.books import LEDGER, OVER, Name, Record
from tests.model.deliveries import Received
from tests.model.explore import Broken
from tests.model.spec import Spec


class Receipt(NamedTuple):
    """What a consumer presents to settle a delivery."""

    token: str
    fence: int


class Fate(NamedTuple):
    """The expected state of a task, derived from the store's answers."""

    state: str = ""
    attempt: int = 1
    losses: int = 0
    holder: Receipt | None = None
    settled: tuple[Receipt, str] | None = None
    """last accepted settlement: its receipt and its verb"""
    since: int = 0
    """position in the order in which tasks became available"""
    due: int = 0
    fence: int = 0
    """highest fence that any delivery of the task has had"""
    undone: Receipt | None = None
    """receipt of a delivery that a failover undid; its holder may have executed the task all the same"""

    # What clients were told, which stays true for them after a failover.
    confirmed: bool = False
    waived: bool = False
    told: str = ""
    """final state that a client was told; empty if none was"""


class Fates(dict[Name, Fate]):
    """The fates of all tasks. Methods record a step; they raise `Broken` if a law forbids it."""

    def change(self, name: Name, **values: object) -> None:
        """Change some fields of a task's fate."""
        self[name] = self[name]._replace(**values)  # type: ignore[arg-type] # the fields are checked where they are read

    def available(self, name: Name) -> None:
        """Record that a task became available, after all tasks that are available already."""
        last = max(fate.since for fate in self.values())
        self.change(name, state="waiting", holder=None, since=last + 1)

    def promoted(self, books: Spec) -> None:
        """Record which scheduled tasks were made available during a step."""
        for name, fate in sorted(self.items(), key=lambda pair: pair[1].due):
            if fate.state == "scheduled" and books.tasks[name].state != "scheduled":
                if fate.due > books.now:
                    raise Broken(f"R9: {name[1]} comes before its time")
                self.available(name)

    def published(self, name: Name, answer: int | str, due: int, now: int) -> None:
        """Record the answer to a publish."""
        accepted = not isinstance(answer, str) and answer >= 0
        if accepted and self[name].state:
            raise Broken(f"R0: {name[1]} is accepted a second time")
        if answer == -1 and not self[name].state:
            raise Broken(f"R1: {name[1]} is called a duplicate, and was never stored")
        if answer == -2:
            raise Broken(f"R0: {name[1]} conflicts with itself")
        if accepted and due > now:
            self.change(name, state="scheduled", due=due)
        elif accepted:
            self.available(name)

    def delivered(self, books: Spec, told: Received, before: Spec) -> None:
        """Record the deliveries of a receive, in their order."""
        for name, _ in told.expired:
            self.ended(name, "expired")
        for name, record in told.given:
            fate = self[name]
            if fate.state in OVER or fate.state == "dead":
                raise Broken(f"R3: {name[1]} is handed out after its end ({fate.state})")
            if fate.state != "waiting":
                raise Broken(f"R5: {name[1]} is handed out, and is {fate.state or 'unknown'}")
            if 0 < before.tasks[name].deadline <= books.now:
                raise Broken(f"R13: {name[1]} is handed out after its deadline")
            if record.fence <= fate.fence:
                raise Broken(f"R5: the receipt of {name[1]} is not above its earlier ones")
            self.first_in_line(name, books, before)
            receipt = Receipt(record.owner, record.fence)
            self.change(name, state="in_flight", holder=receipt, fence=record.fence)

    def first_in_line(self, name: Name, books: Spec, before: Spec) -> None:
        """Raise `Broken` if another task of the queue should have come first, or if the in-flight limit is exceeded."""
        place = -books.tasks[name].priority, self[name].since
        for other, fate in self.items():
            if other[0] != name[0] or fate.state != "waiting":
                continue
            if (-books.tasks[other].priority, fate.since) < place:
                raise Broken(f"R7: {name[1]} is handed out ahead of {other[1]}")
        limit = before.terms_of(name[0]).flow.max_inflight
        if (
            limit
            and sum(f.state == "in_flight" for n, f in self.items() if n[0] == name[0]) >= limit
        ):
            raise Broken(f"R10: more than {limit:.0f} of queue {name[0]} are in flight")

    def settled(
        self, name: Name, receipt: Receipt, verb: str, answer: str, due: int, most: int
    ) -> None:
        """Record the answer to a settlement. A task survives up to ``most`` losses."""
        fate = self[name]
        taken = answer in {"ok", "dead", "accepted"}
        if fate.holder == receipt:
            if not taken:
                raise Broken(
                    f"R5: the receipt of {name[1]} is current, and the {verb} was told {answer!r}"
                )
            self.carried_out(name, verb, due, most)
            self.change(name, holder=None, settled=(receipt, verb))
        elif fate.settled == (receipt, verb):
            if answer == "lost":
                raise Broken(
                    f"R4: {name[1]} was settled by this {verb}, which is told {answer!r} when it comes again"
                )
        elif taken and fate.undone is not None and fate.undone.fence == receipt.fence:
            self.settled_after_failover(name, receipt, verb, due, most)
        elif taken:
            raise Broken(f"R5: a {verb} of {name[1]} is taken though its receipt is not current")

    def settled_after_failover(
        self, name: Name, receipt: Receipt, verb: str, due: int, most: int
    ) -> None:
        """Record a settlement of a delivery that a failover undid and that was then repeated under the same fence.

        R5 is waived here: both holders may have executed the task. So an ack of either of them ends it, and a
        settlement that the other one has sent already gets the same answer.
        """
        fate = self[name]
        if fate.settled and (fate.settled[0].fence, fate.settled[1]) == (receipt.fence, verb):
            return
        if verb != "ack" or fate.holder is None or fate.holder.fence != receipt.fence:
            raise Broken(f"R5: a {verb} of {name[1]} is taken that a failover has undone")
        self.carried_out(name, verb, due, most)
        self.change(name, settled=(receipt, verb))

    def carried_out(self, name: Name, verb: str, due: int, most: int) -> None:
        """Record the effect of an accepted settlement."""
        fate = self[name]
        if verb == "ack":
            self.ended(name, "done")
        elif verb == "bury":
            self.change(name, state="dead")
        elif verb == "retry":
            self.change(name, state="scheduled", attempt=fate.attempt + 1, losses=0, due=due)
        else:
            self.handed_back(name, lost=verb == "lost", most=most)

    def handed_back(self, name: Name, *, lost: bool, most: int) -> None:
        """Record that a delivery returned to the store."""
        losses = self[name].losses + lost
        state = "dead" if lost and losses > most else "waiting"
        self.change(name, state=state, losses=losses, holder=None)

    def ended(self, name: Name, state: str) -> None:
        """Record that a task ended; raise `Broken` if it had ended before in another way."""
        fate = self[name]
        if fate.state in OVER or fate.told not in {"", state}:
            raise Broken(f"R4: {name[1]} is {state}, and was {fate.told or fate.state} already")
        self.change(name, state=state, holder=None)

    def undone(self, before: Fates) -> Fates:
        """Return the fates after a failover undid a step; confirmations that were lost with it are waived."""
        back = Fates(before)
        for name, fate in self.items():
            old = before[name]
            lost = fate.confirmed and not old.state
            told = fate.told if old.state == fate.told else ""
            back.change(name, confirmed=fate.confirmed, waived=old.waived or lost, told=told)
            if fate.holder and fate.holder != old.holder:
                back.change(name, undone=fate.holder)
        return back

    def check(self, books: Spec, *, replicated: bool) -> None:
        """Raise `Broken` unless every record matches its fate and the ledger matches the records.

        ``replicated``: whether publishes were confirmed by a replica, so that no loss is excused.
        """
        found: Counter[tuple[str, str]] = Counter()
        for name, fate in self.items():
            record = books.tasks.get(name)
            if record is None:
                if fate.waived and replicated:
                    raise Broken(f"R1: a replica has confirmed {name[1]}, and it is gone")
                if fate.state or (fate.confirmed and not fate.waived):
                    raise Broken(f"R1: {name[1]} was confirmed and is gone")
                continue
            state = _state(name, record, books)
            if state != fate.state:
                raise Broken(f"R1: {name[1]} is {state}, and should be {fate.state or 'unknown'}")
            if (record.attempt, record.losses) != (fate.attempt, fate.losses):
                raise Broken(
                    f"R6: {name[1]} is at attempt {record.attempt} with {record.losses} losses, "
                    f"and should be at {fate.attempt} with {fate.losses}"
                )
            if record.owner and Receipt(record.owner, record.fence) != fate.holder:
                raise Broken(
                    f"R5: {name[1]} is in flight with {record.owner} and not by its receipt"
                )
            found[name[0], state] += 1
            found[name[0], "published"] += 1
            found[name[0], "fresh"] += record.fresh and state in {"waiting", "scheduled"}
        _balanced(books, found, {name[0] for name in self})


def _state(name: Name, record: Record, books: Spec) -> str:
    """Return the state of a task according to the store's record."""
    if record.owner:
        if record.owner not in books.consumers:
            raise Broken(f"R1: {name[1]} is in flight with nobody whom housekeeping knows")
        return "in_flight"
    if record.state == "waiting" and not record.open:
        raise Broken(f"R1: {name[1]} waits where no receive finds it")
    return record.state


def _balanced(books: Spec, found: Counter[tuple[str, str]], keys: Iterable[str]) -> None:
    for key in keys:
        for counter in (*LEDGER, "fresh"):
            if books.count(key, counter) != found[key, counter]:
                raise Broken(
                    f"R1: the ledger of queue {key} says {books.count(key, counter)} {counter}, "
                    f"and there are {found[key, counter]}"
                )

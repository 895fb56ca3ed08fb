"""What must hold in every state and at every step, told by a book-keeper who sees answers alone and knows no script.

For each task it keeps a `Fate`: what must have become of it if every answer was true. The rules have the numbers of
the checker of the chaos tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from tests.model.books import LEDGER, OVER, Name, Record
from tests.model.explore import Broken
from tests.model.spec import Received, Spec


class Receipt(NamedTuple):
    """What its holder shows for a delivery."""

    token: str
    fence: int


class Fate(NamedTuple):
    """What must have become of a task."""

    state: str = ""
    attempt: int = 1
    losses: int = 0
    holder: Receipt | None = None
    settled: tuple[Receipt, str] | None = None
    """the last settlement, and its verb"""
    since: int = 0
    """its place among all that became available"""
    due: int = 0
    fence: int = 0
    """the highest so far"""
    undone: Receipt | None = None
    """of a hand-out that a failover has undone: whoever has it may have executed the task"""

    # what somebody was told, which a failover can't take back
    confirmed: bool = False
    waived: bool = False
    told: str = ""
    """its end"""


class Fates(dict[Name, Fate]):
    """Those of all tasks; each method is told of a step and raises `Broken` for one that no law allows."""

    def change(self, name: Name, **values: object) -> None:
        """Change some of a fate."""
        self[name] = self[name]._replace(**values)  # type: ignore[arg-type] # the fields are checked where they are read

    def available(self, name: Name) -> None:
        """Put a task behind all that are available."""
        last = max(fate.since for fate in self.values())
        self.change(name, state="waiting", holder=None, since=last + 1)

    def promoted(self, books: Spec) -> None:
        """Note what fell due in the course of a step."""
        for name, fate in sorted(self.items(), key=lambda pair: pair[1].due):
            if fate.state == "scheduled" and books.tasks[name].state != "scheduled":
                if fate.due > books.now:
                    raise Broken(f"R9: {name[1]} comes before its time")
                self.available(name)

    def published(self, name: Name, answer: int | str, due: int, now: int) -> None:
        """Note the answer to a publish."""
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
        """Note what a receive gave, in the order in which it did."""
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
        """Raise unless nothing of its queue comes before it: by priority, then by when it became available."""
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
        """Note the answer to a settlement; ``most`` losses do not kill."""
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
        """Note a settlement of a hand-out that a failover has undone, if it was done again under the same fence.

        R5 is waived so far: both may have executed the task, so the ack of either ends it, and who sends what the
        other has sent before is told the same.
        """
        fate = self[name]
        if fate.settled and (fate.settled[0].fence, fate.settled[1]) == (receipt.fence, verb):
            return
        if verb != "ack" or fate.holder is None or fate.holder.fence != receipt.fence:
            raise Broken(f"R5: a {verb} of {name[1]} is taken that a failover has undone")
        self.carried_out(name, verb, due, most)
        self.change(name, settled=(receipt, verb))

    def carried_out(self, name: Name, verb: str, due: int, most: int) -> None:
        """Note what a settlement does."""
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
        """Note that a delivery came back."""
        losses = self[name].losses + lost
        state = "dead" if lost and losses > most else "waiting"
        self.change(name, state=state, losses=losses, holder=None)

    def ended(self, name: Name, state: str) -> None:
        """Note an end."""
        fate = self[name]
        if fate.state in OVER or fate.told not in {"", state}:
            raise Broken(f"R4: {name[1]} is {state}, and was {fate.told or fate.state} already")
        self.change(name, state=state, holder=None)

    def undone(self, before: Fates) -> Fates:
        """Return what they are once a failover has undone a step; what was told then is waived where it is gone."""
        back = Fates(before)
        for name, fate in self.items():
            old = before[name]
            lost = fate.confirmed and not old.state
            told = fate.told if old.state == fate.told else ""
            back.change(name, confirmed=fate.confirmed, waived=old.waived or lost, told=told)
            if fate.holder and fate.holder != old.holder:
                back.change(name, undone=fate.holder)
        return back

    # What holds at every instant

    def check(self, books: Spec, *, replicated: bool) -> None:
        """Raise unless the books say of every task what its fate says, and the ledger what both do.

        ``replicated``: whether a replica had what was confirmed, so that nothing is waived.
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
    """Return where a task really is."""
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

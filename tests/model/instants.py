"""The laws of schedules, checked at every step of the small model from the store's answers.

``instants``: each instant is over exactly once, not before its time, and none is passed over. ``plans``: a plan for
another version or time changes nothing. ``due``: a schedule is due when its time has come, and at most a second later
if the task was refused. ``records``: the outcomes and the last refusal are kept. ``versions``: none is used twice, and
a repeated put changes nothing. ``R1``: what was accepted is stored, and counted.
"""

from __future__ import annotations

from collections.abc import Collection

from tests.model.books import Name
from tests.model.explore import Broken
from tests.model.schedules import RETRY, Fire, Schedules, Stored, result_of

NAME: Name = ("a", "s")
"""the queue and the name of the schedule"""
SECOND = 1_000_000
PAUSED = "paused"
"""result of an instant that the operator has left out"""


class Instants(dict[int, str]):
    """What became of each instant that is over, by the store's answers. An instant is a number of seconds."""

    def fired(
        self, fire: Fire, answers: list[int | str] | None, before: Stored | None, books: Schedules
    ) -> None:
        """Record the answer to a fire. ``before``: the schedule as it was."""
        stored = books.schedules.get(NAME)
        stale = before is None or (before.version, before.next_at) != (fire.version, fire.planned)
        if stale or answers is None:
            if not stale:
                raise Broken("plans: a plan is refused as stale, and is not")
            if answers is not None or stored != before:
                raise Broken("plans: a plan for another version or time is carried out")
            return
        self.end_all(fire, [result_of(answer) for answer in answers], books)

    def end_all(self, fire: Fire, results: list[tuple[str, bool]], books: Schedules) -> None:
        """Record what became of the instants of a plan, by what is recorded of each and whether it is over."""
        is_refused = bool(results) and not results[-1][1]
        if not is_refused and len(results) != len(fire.runs):
            raise Broken("instants: a step has left tasks out, although none was refused")
        if len(results) > is_refused or not fire.runs:
            for at, number, why in fire.skips:
                for n in range(number):
                    self.end(at // SECOND + n, why, books.now)
        for run, (result, is_over) in zip(fire.runs, results, strict=False):
            if is_over:
                self.end(run.instant // SECOND, result, books.now)
        if is_refused:
            stored, last = books.schedules[NAME], fire.runs[len(results) - 1]
            self.check_refusal(stored, last.instant, len(results), books.now)

    def check_refusal(self, stored: Stored, instant: int, tried: int, now: int) -> None:
        """Raise `Broken` unless the last refusal is kept, and a schedule that fired nothing lets others come first."""
        if not stored.refused.startswith(f"{instant} "):
            raise Broken(f"records: the refusal of {instant // SECOND} is not kept")
        if tried == 1 and (stored.due or 0) <= now:
            raise Broken("due: a schedule that was refused hides others")

    def end(self, instant: int, result: str, now: int) -> None:
        """Record that an instant is over."""
        if instant in self:
            raise Broken(f"instants: {instant} is {result}, and was {self[instant]} already")
        if result == "duplicate":
            raise Broken(f"instants: {instant} is a duplicate, and no task was published for it")
        if instant * SECOND > now:
            raise Broken(f"instants: {instant} is {result} before its time")
        self[instant] = result

    def check(self, books: Schedules, every: Collection[int], since: int | None) -> None:
        """Raise `Broken` unless the store agrees with what became of the instants.

        ``every``: all instants; ``since``: the first one of the present schedule, ``None`` if it does not fire.
        """
        accepted = {instant for instant, result in self.items() if result == "accepted"}
        if missing := [n for n in accepted if (NAME[0], f"s.{n}") not in books.tasks]:
            raise Broken(f"R1: the tasks of {missing} were accepted and are gone")
        if books.count(NAME[0], "published") != len(accepted):
            raise Broken("R1: the ledger does not count the tasks of the instants")
        stored = books.schedules.get(NAME)
        if stored is None or since is None:
            return
        over = {n for n in every if stored.next_at is None or n * SECOND < stored.next_at}
        if missing := sorted(over - self.keys()):
            raise Broken(f"instants: {missing} are passed over")
        if again := sorted(self.keys() - over):
            raise Broken(f"instants: {again} are over, and the schedule continues with them")
        recorded = {
            int(line.split(" ")[0]) // SECOND + n
            for line in stored.lines
            for n in range(int(line.split(" ")[2]))
        }
        if recorded != {n for n, result in self.items() if n >= since and result != PAUSED}:
            raise Broken(f"records: the outcomes are those of {sorted(recorded)}")
        if stored.next_at is None:
            return
        latest = max(stored.next_at, books.now + RETRY)
        if stored.due is None or not stored.next_at <= stored.due <= latest:
            raise Broken(f"due: the schedule is due at {stored.due}, not at {stored.next_at}")

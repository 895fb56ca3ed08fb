# ruff: noqa: D102 - each method stands for the one of `Schedules` that it breaks
"""Specifications of schedules with one deliberate mistake each; the exploration must find each."""

from __future__ import annotations

from abc import ABC, abstractmethod

from tests.model.books import Name
from tests.model.firing import Bounds
from tests.model.schedules import Fire, Run, Schedules, Stored, result_of


class FiresOldTimes(Schedules):
    """Mistake: does not compare the time for which a fire was planned."""

    def fire(self, fire: Fire) -> list[int | str] | None:
        old = self.schedules.get(fire.name)
        return super().fire(fire._replace(planned=old.next_at) if old else fire)


class FiresOldVersions(Schedules):
    """Mistake: does not compare the version for which a fire was planned."""

    def fire(self, fire: Fire) -> list[int | str] | None:
        old = self.schedules.get(fire.name)
        return super().fire(fire._replace(version=old.version) if old else fire)


class _Afterwards(Schedules, ABC):
    """Changes a schedule after a fire."""

    def fire(self, fire: Fire) -> list[int | str] | None:
        answers = super().fire(fire)
        if answers is not None:
            stored = self.schedules[fire.name]
            is_refused = bool(answers) and not result_of(answers[-1])[1]
            self.schedules[fire.name] = self.changed(stored, fire, is_refused=is_refused)
        return answers

    @abstractmethod
    def changed(self, stored: Stored, fire: Fire, *, is_refused: bool) -> Stored:
        """Return what the schedule becomes after the fire."""


class PassesOverTheRefused(_Afterwards):
    """Mistake: continues with the next time of the plan although a task was refused."""

    def changed(self, stored: Stored, fire: Fire, *, is_refused: bool) -> Stored:
        return stored._replace(next_at=fire.next_at, due=fire.next_at) if is_refused else stored


class ForgetsTheRest(_Afterwards):
    """Mistake: the same, but only for a task that is not the first of its plan."""

    def changed(self, stored: Stored, fire: Fire, *, is_refused: bool) -> Stored:
        if not is_refused or stored.next_at == fire.planned:
            return stored
        return stored._replace(next_at=fire.next_at, due=fire.next_at)


class StaysBehind(_Afterwards):
    """Mistake: does not set the next time in the step that publishes the tasks."""

    def changed(self, stored: Stored, fire: Fire, *, is_refused: bool) -> Stored:  # noqa: ARG002
        return stored._replace(next_at=fire.planned, due=fire.planned)


class LosesTheRefused(_Afterwards):
    """Mistake: a schedule whose task was refused is never due again."""

    def changed(self, stored: Stored, fire: Fire, *, is_refused: bool) -> Stored:  # noqa: ARG002
        return stored._replace(due=None) if is_refused else stored


class HidesOthers(_Afterwards):
    """Mistake: a schedule whose task was refused is due again at once."""

    def changed(self, stored: Stored, fire: Fire, *, is_refused: bool) -> Stored:  # noqa: ARG002
        return stored._replace(due=stored.next_at) if is_refused else stored


class ForgetsWhyRefused(_Afterwards):
    """Mistake: does not keep the refusal of a task."""

    def changed(self, stored: Stored, fire: Fire, *, is_refused: bool) -> Stored:  # noqa: ARG002
        return stored._replace(refused="")


class RecordsTheFirst(_Afterwards):
    """Mistake: records only the first of the instants that are skipped."""

    def changed(self, stored: Stored, fire: Fire, *, is_refused: bool) -> Stored:  # noqa: ARG002
        first = {f"{at} {self.now} {n} " for at, n, _ in fire.skips[1:]}
        lines = [line for line in stored.lines if not any(map(line.startswith, first))]
        return stored._replace(lines=tuple(lines))


class RefusesAsOver(Schedules):
    """Mistake: takes the refusal of a task for the end of its instant."""

    def publish_run(self, key: str, run: Run) -> int | str:
        answer = super().publish_run(key, run)
        return answer if result_of(answer)[1] else -1


class StoresOnlyOne(Schedules):
    """Mistake: stores only the first task of a plan."""

    def fire(self, fire: Fire) -> list[int | str] | None:
        answers = super().fire(fire)
        for run in fire.runs[1:] if answers else ():
            self.tasks.pop((fire.name[0], run.id), None)
        return answers


class TurnsBack(Schedules):
    """Mistake: a change sets the next time even if it is to be kept."""

    def put_schedule(
        self, name: Name, given: Stored, version: int | None, *, keep: bool
    ) -> Stored | int:
        return super().put_schedule(name, given, version, keep=keep and name not in self.schedules)


class CountsVersionsAgain(Schedules):
    """Mistake: the versions of a schedule begin at 1 again after it was deleted."""

    def delete_schedule(self, name: Name, version: int | None) -> int:
        self.puts = 0
        return super().delete_schedule(name, version)


class PutsTwice(Schedules):
    """Mistake: takes a repeated put for a new one."""

    def put_schedule(
        self, name: Name, given: Stored, version: int | None, *, keep: bool
    ) -> Stored | int:
        old = self.schedules.get(name)
        known = old is not None and old.spec == given.spec
        return super().put_schedule(name, given, None if known else version, keep=keep)


_USUAL = Bounds()
_FULL = Bounds(capacity=1)
_LATE = Bounds(catch_up="last", late=2, instants=4)

FIRING_MISTAKES: dict[type[Schedules], tuple[Bounds, str]] = {
    FiresOldTimes: (_USUAL, "plans"),
    FiresOldVersions: (_USUAL, "plans"),
    PassesOverTheRefused: (_FULL, "instants"),
    ForgetsTheRest: (_FULL, "instants"),
    StaysBehind: (_USUAL, "instants"),
    LosesTheRefused: (_FULL, "due"),
    HidesOthers: (_FULL, "due"),
    ForgetsWhyRefused: (_FULL, "records"),
    RecordsTheFirst: (_LATE, "records"),
    RefusesAsOver: (_FULL, "instants"),
    StoresOnlyOne: (_USUAL, "R1"),
    TurnsBack: (_USUAL, "instants"),
    CountsVersionsAgain: (_USUAL._replace(changes=2), "versions"),
    PutsTwice: (_USUAL, "versions"),
}
"""for each mistake: the bounds in which it shows, and the rule that it breaks"""

# ruff: noqa: D102 - each method stands for the one of `Replay` that it breaks
"""Specifications of tags and of kept tasks with one deliberate mistake each, which a replay must find."""

from __future__ import annotations

from typing import Any

from tests.model.books import Name, Record
from tests.model.looks import Item
from tests.model.replay import Replay
from tests.model.terms import Terms


def _outlived(
    model: Replay, key: str, state: str, budget: int, wrong: Terms
) -> list[tuple[int, str]]:
    """Return what `Replay.outlived` returns with other settings."""
    terms = model.terms_of(key)
    model.terms[key] = wrong
    found = Replay.outlived(model, key, state, budget)
    model.terms[key] = terms
    return found


class IndexesEveryTag(Replay):
    """Mistake: a task is found by tags that its queue does not index."""

    def tag(self, name: Name, tags: tuple[str, ...]) -> None:
        super().tag(name, tags)
        self.put(name, self.tasks[name]._replace(indexed=frozenset(tags)))


class IndexesBySettingsOfNow(Replay):
    """Mistake: the setting of the time of the search decides, instead of that of the publish."""

    def items_of(self, key: str, kind: str, *rest: Any) -> list[Item]:
        index = self.terms_of(key).names
        for name, r in list(self.of(key)):
            found = frozenset(tag for tag in r.tags if tag.partition(":")[0] in index)
            self.put(name, r._replace(indexed=found))
        return super().items_of(key, kind, *rest)


class KeepsReplacedTags(Replay):
    """Mistake: a task whose contents are replaced keeps its former tags."""

    def tag(self, name: Name, tags: tuple[str, ...]) -> None:
        former = self.tasks[name]
        if not former.tags:
            super().tag(name, tags)


class ForgetsTheWorker(Replay):
    """Mistake: an ended task does not keep its worker."""

    def finish(self, name: Name, r: Record, state: str) -> None:
        super().finish(name, r, state)
        self.put(name, self.tasks[name]._replace(worker=""))


class ForgetsWhoFailed(Replay):
    """Mistake: a dead letter does not keep its worker."""

    def bury(self, name: Name, r: Record) -> None:
        super().bury(name, r)
        self.put(name, self.tasks[name]._replace(worker=""))


class IncludesUntil(Replay):
    """Mistake: a list by time has the tasks at its end as well."""

    def on_list(self, words: list[bytes], answer: Any) -> Any:
        if words[11]:
            words[11] = b"%d" % (int(words[11]) + 1)
        return super().on_list(words, answer)


class IgnoresSince(Replay):
    """Mistake: a list by time begins with the first task of all."""

    def on_list(self, words: list[bytes], answer: Any) -> Any:
        words[10] = b""
        return super().on_list(words, answer)


class KeepsAWindowOnly(Replay):
    """Mistake: ended tasks are forgotten with their ids, whatever the queue keeps."""

    def outlived(self, key: str, state: str, budget: int) -> list[tuple[int, str]]:
        return _outlived(self, key, state, budget, self.terms_of(key)._replace(keep=0))


class KeepsAnyNumber(Replay):
    """Mistake: however many tasks have ended, each is kept for its time."""

    def outlived(self, key: str, state: str, budget: int) -> list[tuple[int, str]]:
        unlimited = self.terms_of(key)._replace(most=10**9)
        return _outlived(self, key, state, budget, unlimited)


class CountsFromTheFront(Replay):
    """Mistake: positions in a list of ends change when the oldest tasks leave it."""

    def forget(self, budget: int) -> int:
        forgotten = super().forget(budget)
        self.dropped.clear()
        return forgotten


class KnowsKeptIds(Replay):
    """Mistake: a task that is kept only to be shown makes a publish of its id a duplicate."""

    def forgettable(self, key: str, record: Record) -> bool:
        return super().forgettable(key, record) and self.now >= record.at + self.terms_of(key).kept


class RemovesErasedPlaces(Replay):
    """Mistake: an erased task leaves no place in the list of its end, so that later positions change."""

    def erase(self, name: Name) -> None:
        super().erase(name)
        for ended in self.ends[name[0]].values():
            ended[:] = [place for place in ended if place[1]]


class KeepsErasedTasks(Replay):
    """Mistake: an erased task only ends."""

    def erase(self, name: Name) -> None:
        if not self.cancel(name):
            self.redrive(name, discard=True)


LIST_MISTAKES: dict[type[Replay], str] = {
    IndexesEveryTag: "list|erase",
    IndexesBySettingsOfNow: "list|erase",
    KeepsReplacedTags: "list|task|erase",
    ForgetsTheWorker: "list|task",
    ForgetsWhoFailed: "list|task",
    IncludesUntil: "list",
    IgnoresSince: "list",
    KeepsAWindowOnly: "maintain",
    KeepsAnyNumber: "maintain",
    CountsFromTheFront: "list",
    KnowsKeptIds: "publish|schedule_fire",
    RemovesErasedPlaces: "list",
    KeepsErasedTasks: "list|task|erase|publish|schedule_fire",
}
"""for each mistake, the scripts of which one shows it first"""

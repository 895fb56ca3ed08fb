"""The scripts for schedules, in the specification: their arguments and answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from tests.model.books import Name
from tests.model.lines import Lines
from tests.model.schedules import Fire, Run, Stored, field_of, result_of


class Fires(Lines, ABC):
    """The scripts for schedules."""

    def __init__(self) -> None:
        super().__init__()
        self.fired = 0
        """number of instants that tasks were published for, or other tasks with their unique keys stopped"""

    @abstractmethod
    def store(self, key: str, task: bytes, about: bytes, body: bytes) -> int | str:
        """Publish one task, in the subclass that keeps bodies."""

    def publish_run(self, key: str, run: Run) -> int | str:
        """Publish the task of an instant, and keep its body."""
        self.meet(key)
        self.publish(key, [])  # promotes due tasks first
        return self.store(key, *run.task)

    def on_schedule_put(self, words: list[bytes], _: Any) -> Any:
        """Store a schedule."""
        key, name, version, keep, next_at = (word.decode() for word in words[:5])
        lines = tuple(words[6].decode().splitlines())
        given = Stored(0, _time(next_at), None, lines, spec=words[5])
        stored = self.put_schedule((key, name), given, _time(version), keep=keep == "1")
        replicas = self.terms_of(key).replicas
        if isinstance(stored, int):
            return [replicas, stored]
        shown = _shown(stored.next_at), "\n".join(stored.lines), stored.refused
        return [replicas, stored.version, *shown]

    def on_schedule_delete(self, words: list[bytes], _: Any) -> Any:
        """Delete a schedule."""
        key, name, version = (word.decode() for word in words)
        return self.delete_schedule((key, name), _time(version))

    def on_schedule_fire(self, words: list[bytes], _: Any) -> Any:
        """Fire schedules."""
        told: list[Any] = [0]
        while words and not self.ends_early:
            key, name, version, planned, next_at, skips, number, instants = (
                word.decode() for word in words[:8]
            )
            times = map(int, instants.split())
            tasks = words[8 : 8 + 3 * int(number)]
            del words[: 8 + 3 * int(number)]
            fire = Fire(
                (key, name), int(version), _time(planned), _time(next_at),
                tuple(Run(at, t[0].decode(), t) for at, t in zip(times, _threes(tasks), strict=True)),
                tuple(map(_skip, skips.splitlines())),
            )  # fmt: skip
            answers = self.fire(fire)
            told.append(0 if answers is None else answers)
            self.fired += sum(result_of(answer)[1] for answer in answers or ())
            if answers:
                told[0] = max(told[0], self.terms_of(key).replicas)
        return told

    def on_schedule_due(self, words: list[bytes], _: Any) -> Any:
        """Return schedules that are due."""
        limit, waiting = int(words[0]), self.by_due_time()
        late = [name for at, name in waiting if at <= self.now]
        told = self.told_of_schedules(late[:limit], plain=True)
        rest = waiting[len(told) // 3 :]
        return [self.now, rest[0][0] if rest else "", *told]

    def on_schedules(self, words: list[bytes], _: Any) -> Any:
        """List schedules by name."""
        first, last, most = words[0].decode(), words[1].decode(), int(words[2])
        names = sorted(self.schedules, key=field_of)
        some = [name for name in names if _within(field_of(name), first, last)]
        return self.told_of_schedules(some[:most])

    def told_of_schedules(self, names: Sequence[Name], *, plain: bool = False) -> list[Any]:
        """Return the field, the record and the specification of each schedule, until the call has read enough.

        A ``plain`` record has no outcomes.
        """
        told = list[Any]()
        for name in names:
            stored = self.schedules[name]
            head = f"{stored.version}:{_shown(stored.next_at)}"
            head += f":{stored.refused}" if stored.refused else ""
            record = head + "\n" + ("" if plain else "\n".join(stored.lines))
            told += [field_of(name), record, stored.spec]
            self.read += len(record) + len(stored.spec)
            if self.sated:
                break
        return told


def _within(field: str, first: str, last: str) -> bool:
    """Return whether a field is in a range, as ZRANGE BYLEX takes it."""
    late = first == "-" or field > first[1:] or (first[0] == "[" and field == first[1:])
    early = last == "+" or field < last[1:] or (last[0] == "[" and field == last[1:])
    return late and early


def _threes(words: Sequence[bytes]) -> list[Sequence[bytes]]:
    return [words[n : n + 3] for n in range(0, len(words), 3)]


def _skip(line: str) -> tuple[int, int, str]:
    at, number, why = line.split(" ", 2)
    return int(at), int(number), why


def _time(word: str) -> int | None:
    return int(word) if word else None


def _shown(time: int | None) -> int | str:
    return "" if time is None else time

"""The part of the specification that decides about unique keys, in the step of a publish."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from tests.model.books import Held, Name, Record
from tests.model.deliveries import Deliveries


class Unique(NamedTuple):
    """A unique key as a publisher sends it, with times in microseconds."""

    key: str
    on_conflict: str = "keep"
    started: bool = False
    period: int = 0
    seconds: int = 0
    """how long a debounce puts the task off; 0: there is no debounce"""
    max_wait: int = 0

    @classmethod
    def read(cls, text: bytes) -> Self | None:
        """Return the key in the JSON text that a publisher sends; ``None`` for an empty text."""
        return cls.of(json.loads(text)) if text else None

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """Return the key with the fields that a publisher sends."""
        numbers = (fields.get(name, 0) for name in ("p", "d", "m"))
        return cls(fields["k"], fields["c"], fields.get("s", False), *numbers)

    def held(self, first: int) -> Held:
        """Return the key of a task that is stored with it."""
        return Held(self.key, self.started, self.period and first + self.period, first)

    def due(self, not_before: int, now: int, first: int) -> int:
        """Return when the task is due."""
        if not self.seconds:
            return not_before
        at = now + self.seconds
        return min(at, first + self.max_wait) if self.max_wait else at


class Publish(NamedTuple):
    """A task as a publisher sends it."""

    id: str
    digest: str = ""
    priority: int = 5
    not_before: int = 0
    deadline: int = 0
    unique: Unique | None = None
    after: Any = None
    batch: str = ""
    tenant: str = ""
    tags: tuple[str, ...] = ()

    def due(self, now: int, first: int) -> int:
        """Return when the task is due."""
        if self.unique is None:
            return self.not_before
        return self.unique.due(self.not_before, now, first)


class UniqueKeys(Deliveries):
    """The specified decisions about unique keys."""

    def decide(self, key: str, task: Publish) -> str:
        """Return the answer to a publish whose key is held, after a replacement; empty if the task is to be stored."""
        unique = task.unique
        if unique is None:
            return ""
        kept = ""
        for name, r in sorted(self.of(key)):
            if r.unique is None or r.unique.key != unique.key or not self.holds(r):
                continue
            if unique.on_conflict != "replace":
                how = "not_unique" if unique.on_conflict == "refuse" else "duplicate"
                return f"{how}:{name[1]}"
            if r.live and not r.handed and not r.owner:
                self.replace(name, r, (key, task.id), task)
                return f"replaced:{name[1]}"
            if self.now < r.unique.till:
                kept = f"duplicate:{name[1]}"
        return kept

    def holds(self, r: Record) -> bool:
        """Return whether a task holds its unique key."""
        if r.unique is None:
            return False
        fresh = r.live and not r.handed and not r.owner
        return (fresh if r.unique.started else r.live) or self.now < r.unique.till

    def replace(self, name: Name, r: Record, other: Name, task: Publish) -> None:
        """Give a task the contents and the time of another one, whose id is remembered."""
        if r.unique is None or task.unique is None:
            raise AssertionError("both tasks have the key")
        first, waited = r.unique.first, r.state == "waiting"
        self.take_contents(name, other, task)
        changed = (r if r.state == "blocked" else self.withdraw(name, r))._replace(
            priority=task.priority,
            deadline=task.deadline,
            unique=task.unique.held(first),
            tenant=task.tenant,
        )
        if r.fresh and r.state != "blocked":
            self.add(name[0], "fresh", 1)
        at = task.due(self.now, first)
        if r.state == "blocked":
            self.put(name, changed._replace(at=self.now))
            self.delay(name, at)
        elif at > self.now:
            self.schedule(name, changed, at)
        elif waited:
            self.put_back(name, changed)
        else:
            self.make_available(name, changed)
        self.tag(name, task.tags)
        self.remember(other, "replaced")
        past = Record(digest=task.digest, priority=task.priority, state="replaced")
        self.put(other, past._replace(at=self.now, instead=name[1]))

    def tag(self, name: Name, tags: tuple[str, ...]) -> None:
        """Note the tags that a task has been published with, last in the order of those with the same tag."""
        index, last = self.terms_of(name[0]).names, self.last.get(name[0], 0)
        indexed = frozenset(tag for tag in tags if tag.partition(":")[0] in index)
        self.put(
            name,
            self.tasks[name]._replace(tags=tags, indexed=indexed, published=last if tags else 0),
        )

    def delay(self, name: Name, at: int) -> None:
        """Give a blocked task another time. The small models have none."""
        raise NotImplementedError

    def take_contents(self, name: Name, other: Name, task: Publish) -> None:
        """Give a task the body of another one. Nothing is to be done here: only the replay knows bodies."""

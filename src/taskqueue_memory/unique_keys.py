"""The unique keys of a queue, with the entries that may hold them."""

from __future__ import annotations

from typing import Generic, TypeVar

from taskqueue_core.authoring.entries import Entry

T = TypeVar("T", bound=Entry)


class UniqueKeys(Generic[T]):
    """By unique key, the entries whose tasks have it. Those that hold nothing are removed when the key is looked up."""

    def __init__(self) -> None:
        self.entries: dict[str, dict[T, None]] = {}

    def add(self, entry: T) -> None:
        """Add an entry that is stored or available again, if its task has a unique key."""
        if entry.task.unique is not None:
            self.entries.setdefault(entry.task.unique.key, {})[entry] = None

    def remove(self, entry: T) -> None:
        """Remove an entry whose record is deleted, or whose task gets other contents."""
        unique = entry.task.unique
        if unique is None or (entries := self.entries.get(unique.key)) is None:
            return
        entries.pop(entry, None)
        if not entries:
            del self.entries[unique.key]

    def holders(self, key: str, now: float) -> list[T]:
        """Return the entries that hold a key."""
        entries = self.entries.get(key)
        if entries is None:
            return []
        for entry in [entry for entry in entries if not entry.holds(now)]:
            del entries[entry]
        if not entries:
            del self.entries[key]
        return list(entries)

"""Ordering keys: of the entries with the same one, one holds it and the others wait for it, outside of the lanes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from taskqueue_memory.lanes import Lane

if TYPE_CHECKING:
    from taskqueue_memory.records import Record

__all__ = ["Turns"]


class Turns:
    """Who holds each ordering key of a queue, and who is next."""

    def __init__(self) -> None:
        """Start with no keys."""
        self._holders: dict[str, Record] = {}
        self._held: dict[str, Lane] = {}

    def __iter__(self) -> Iterator[Lane]:
        """Iterate over the lanes of those that wait for their key."""
        return iter(self._held.values())

    def __len__(self) -> int:
        """Count the keys that somebody holds."""
        return len(self._holders)

    def comes(self, record: Record, key: str) -> None:
        """Have an entry that becomes available hold its key, or wait for it: it is ``held`` then."""
        record.held = self._holders.setdefault(key, record) is not record
        if record.held:
            self._held.setdefault(key, Lane()).append(record)

    def goes(self, record: Record, key: str) -> Record | None:
        """Have an entry that ended or died hold its key no more. Return who holds it now, ready for its lane."""
        if self._holders.get(key) is not record:
            return None
        lane = self._held.get(key)
        following = None if lane is None else lane.pop()
        if following is None:
            del self._holders[key]
            self._held.pop(key, None)
        else:
            self._holders[key] = following
            following.held = False
        return following

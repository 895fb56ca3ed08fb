"""The tasks of a queue by tag, in the order of their publishes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class TagIndex(Generic[T]):
    """By tag, the records that have it, each with the number of its publish."""

    def __init__(self) -> None:
        self._records: dict[str, dict[T, int]] = {}
        self._tags: dict[T, tuple[str, ...]] = {}

    def add(self, record: T, tags: tuple[str, ...], number: int) -> None:
        """Add a record under each of these tags."""
        if not tags:
            return
        self._tags[record] = tags
        for tag in tags:
            self._records.setdefault(tag, {})[record] = number

    def remove(self, record: T) -> None:
        """Remove a record whose task is forgotten, or gets other contents."""
        for tag in self._tags.pop(record, ()):
            records = self._records[tag]
            del records[record]
            if not records:
                del self._records[tag]

    def of(self, tag: str) -> Iterable[tuple[T, int]]:
        """Return the records with a tag, and the numbers of their publishes."""
        return self._records.get(tag, {}).items()

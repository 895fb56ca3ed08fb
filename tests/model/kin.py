"""The terms of tasks that wait for others: what they wait for, what is known of it, and what lines say."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tests.model.books import Name
from tests.model.spec import Publish


class After(msgspec.Struct):
    """What a task waits for, as its envelope says."""

    when: str = "done"
    cancels: bool = False
    parents: Sequence[str] = ()
    inputs: Sequence[int] = ()


class Wait(msgspec.Struct):
    """What is known about the parents of a blocked task."""

    after: After
    entry: int
    missing: dict[str, int]
    """the missing parents, each with the highest version that was reported"""
    dead: set[str] = msgspec.field(default_factory=set)
    number: int = 0
    """number of missing parents"""
    size: int = 0
    failed: bool = False
    reason: str = ""
    time: int = 0
    counts: dict[str, tuple[int, ...]] | None = None
    """of a batch that has not ended, the counts by partition: version, closed, added, done, failed"""
    batch: bool = False
    sealed: bool = False

    @property
    def met(self) -> bool:
        """Whether the task waits for nothing more."""
        return (self.number == 0 or self.failed) and self.counts is None


class Said(msgspec.Struct):
    """What a line says, or what is left to report of a parent."""

    number: int
    entry: str = ""
    wanted: bool = False
    state: str = ""
    version: int = 0
    result: bytes = b""
    counts: tuple[int, ...] = ()
    last: str = ""


def text(name: Name) -> str:
    """Return the name of a task in scripts."""
    return f"{name[0]}/{name[1]}"


def named(name: str) -> Name:
    """Parse the name of a task in scripts."""
    key, _, task = name.partition("/")
    return key, task


def published(name: bytes, about: bytes, body: bytes) -> Publish:
    """Parse the arguments of a publish for one task."""
    usual, _, rare = about[9:].partition(b"\n")
    times, _, rest = usual.partition(b"/")
    if rest.partition(b"/")[2]:
        raise NotImplementedError("the specification knows no ordering keys")
    _, not_before, deadline = (times or b"::").split(b":")
    after, batch = None, ""
    if rare:
        head = 5 if body[0] == 2 else 3
        size = int.from_bytes(body[1:head], "big")
        header = msgspec.msgpack.decode(body[head : head + size])
        batch = header.get("batch", "")
        if about_after := header.get("after"):
            after = After(about_after["w"], "c" in about_after, about_after["p"], about_after["i"])
    times_of = int(not_before or 0), int(deadline or 0)
    return Publish(name.decode(), about[:8].hex(), int(about[8:9]), *times_of, after, batch)

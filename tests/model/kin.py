"""The terms of tasks that wait for others: what they wait for, what is known of it, and what lines say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from tests.model.books import Name
from tests.model.unique import Publish, Unique

_WIDE, _LINKED = 2, 3
"""versions of an envelope"""


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
        raise ValueError("a task has an ordering key, which the specification does not know")
    tenant = rest.partition(b"/")[0].decode()
    _, not_before, deadline = (times or b"::").split(b":")
    fields: dict[str, Any] = json.loads(rare) if rare else {}
    after = header_of(body).get("after") if "a" in fields else None
    return Publish(
        name.decode(),
        about[:8].hex(),
        int(about[8:9]),
        int(not_before or 0),
        int(deadline or 0),
        Unique.of(fields["u"]) if "u" in fields else None,
        after and After(after["w"], "c" in after, after["p"], after["i"]),
        fields.get("b", ""),
        tenant,
        tuple(fields.get("t", ())),
    )


def header_of(body: bytes) -> dict[str, Any]:
    """Return the fields of a task that are not at their defaults."""
    if body[0] == _LINKED:
        links, contents = _parts_of(body)
        return {**header_of(contents), "after": links.get("after"), "batch": links.get("batch")}
    head = 5 if body[0] == _WIDE else 3
    size = int.from_bytes(body[1:head], "big")
    return msgspec.msgpack.decode(body[head : head + size]) if size else {}


def linked_as(body: bytes, former: bytes) -> bytes:
    """Return a body with the parents and the batch of another one instead of its own."""
    header = header_of(former)
    links = {name: header[name] for name in ("after", "batch") if header.get(name)}
    packed = msgspec.msgpack.encode(links | {"replaced": True})
    return bytes((_LINKED,)) + len(packed).to_bytes(4, "big") + packed + body


def shown(body: bytes) -> Any:
    """Return a body in a form in which equal ones are equal: scripts write the parents and the batch in any order."""
    if body[:1] != bytes((_LINKED,)):
        return body
    links, contents = _parts_of(body)
    return [json.dumps(links, sort_keys=True), contents]


def _parts_of(body: bytes) -> tuple[Any, bytes]:
    size = 5 + int.from_bytes(body[1:5], "big")
    return msgspec.msgpack.decode(body[5:size]), body[size:]

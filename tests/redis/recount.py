"""Recounting a queue from its Redis data structures, to check the counters that the backend keeps."""

from __future__ import annotations

import math
import struct
from collections import Counter
from typing import Any, NamedTuple

import msgspec

from tests.redis.servers import RedisServer

_STATES = (
    "", "waiting", "scheduled", "done", "dead", "expired", "cancelled", "discarded", "replaced", "blocked",
)  # fmt: skip
_ENDS = {
    "done": "l", "expired": "l:expired", "cancelled": "l:cancelled", "discarded": "l:discarded",
    "replaced": "l:replaced",
}  # fmt: skip
"""lists of ended tasks"""
_OVER = ("done", "expired", "cancelled", "discarded")
_LEDGER = ("published", "in_flight", *(s for s in _STATES[1:] if s != "replaced"))
_NUMBERS = (
    "waiting", "back", "in_flight", "published", "delivered", "done", "last", "due", "window", "extras", "journal",
    "replicas", "fresh", "kind", "laned", "held",
)  # fmt: skip
"""the fields of a queue's packed counters, in the order of lua/lib/queue.lua"""


_SIZE = 49
"""bytes of a record without its optional mark, tenant and ordering key"""


class _Partition:
    def __init__(self, server: RedisServer, name: str) -> None:
        self.connection = server.connect()
        self.name = name

    def ask(self, command: str, key: str, *words: str | int) -> Any:
        return self.connection.call(*command.split(), f"{self.name}:{key}", *words)

    def pairs(self, key: str) -> dict[str, bytes]:
        told = self.ask("HGETALL", key)
        return {told[n].decode(): told[n + 1] for n in range(0, len(told), 2)}

    def first(self, key: str) -> int | None:
        head = self.ask("ZRANGE", key, 0, 0, "WITHSCORES")
        return int(head[1]) if head else None


def recounted(server: RedisServer, prefix: str, partition: int = 0) -> dict[str, dict[str, int]]:
    """Recount the data structures of each queue, assert that the stored counters agree, and return the counters."""
    part = _Partition(server, f"{{{prefix}:{partition}}}")
    try:
        queues = {key.decode() for key in part.ask("SMEMBERS", "queues")}
        books = {key: _recount(part, key) for key in queues}
        ready = {key.decode() for key in part.ask("SMEMBERS", "ready")}
        assert ready == {key for key, book in books.items() if book["waiting"] > book["held"]}
        for index, heap in (("due", "d"), ("deadlines", "e"), ("results", "k")):
            told = part.ask("ZRANGE", index, 0, -1, "WITHSCORES")
            found = {told[n].decode(): int(told[n + 1]) for n in range(0, len(told), 2)}
            heads = {key: part.first(f"q:{key}/{heap}") for key in queues}
            assert found == {key: head for key, head in heads.items() if head is not None}, index
        _relatives(part, queues)
        _housekept(part, queues)
        _consumers(part, queues)
    finally:
        part.connection.close()
    return books


def _recount(part: _Partition, key: str) -> dict[str, int]:
    q = f"q:{key}"
    book = dict.fromkeys((*_LEDGER, "back", "held"), 0)
    book |= {name: int(value) for name, value in part.pairs(q).items() if name in book}
    packed = part.ask("GET", f"{q}/n")
    numbers = dict(zip(_NUMBERS, struct.unpack_from(f"<{len(_NUMBERS)}d", packed), strict=True))
    book |= {name: int(value) for name, value in numbers.items() if name in book}
    entries: dict[tuple[int, int], str] = {}
    back = 0
    pending: set[tuple[int, int]] = set()
    for priority in range(10):
        back += part.ask("ZCARD", f"{q}/z{priority}")
        for place, kind in ((1, "s"), (2, "r")):
            name = f"{q}/{kind}{priority}"
            for entry, fields in part.ask("XRANGE", name, "-", "+"):
                entries[place, int(entry.split(b"-")[0])] = fields[0].decode()
            if part.ask("EXISTS", name) and part.ask("XINFO GROUPS", name):
                pending |= {(place, fence) for fence in _pending(part, name)}
    records = part.pairs(f"{q}/t")
    states = Counter(_STATES[record[0]] for record in records.values())
    fresh = 0
    for task_id, record in records.items():
        fence, place = int.from_bytes(record[18:25], "big"), record[1]
        if record[0] == 1 and place in {1, 2}:
            assert entries.pop((place, fence)) == task_id
        if record[0] in {1, 2, 9} and (place, fence) not in pending:
            attempt, handed = (int.from_bytes(record[at : at + 2], "big") for at in (3, 9))
            fresh += attempt == 1 and handed == 0
    assert numbers["fresh"] == fresh
    assert not entries, "a stream holds what no record knows"
    assert states["waiting"] == book["waiting"] + book["in_flight"]
    assert states["dead"] == book["dead"]
    replaced = {state: book[state] - states[state] for state in _OVER}
    assert min(replaced.values()) >= 0, replaced  # a retry can replace a task that had ended
    tasks = len(records) - states["replaced"]
    assert tasks + sum(replaced.values()) == book["published"]
    assert (len(pending), back) == (book["in_flight"], book["back"])
    assert part.ask("ZCARD", f"{q}/d") == book["scheduled"]
    assert part.ask("ZCARD", f"{q}/dead") == book["dead"]
    assert part.ask("ZCARD", f"{q}/blocked") == book["blocked"] == states["blocked"]
    held = _recount_lanes(part, q, numbers, records, pending)
    assert part.ask("HLEN", f"{q}/b") == sum((
        book["scheduled"], book["dead"], book["blocked"], back, held,
    ))  # fmt: skip
    assert book["published"] == sum(book[name] for name in _LEDGER[1:])
    assert numbers["due"] == (part.first(f"{q}/d") or math.inf)
    _recount_rest(part, q, records, {fence for _, fence in pending})
    return book


def _recount_rest(part: _Partition, q: str, records: dict[str, bytes], flying: set[int]) -> None:
    """Assert that only the necessary data of ended tasks are kept, and that all of them will be removed in time."""
    live, over = set[str](), set[str]()
    for task_id, record in records.items():
        if record[0] in {1, 2, 9}:
            live.add(task_id)
        elif _STATES[record[0]] in {*_OVER, "replaced"}:
            over.add(task_id)
    assert {int(fence) for fence in part.ask("HKEYS", f"{q}/a")} <= flying
    timed = {int(name[2:]) for name in part.ask("ZRANGE", f"{q}/m", 0, -1)}
    assert timed <= flying
    assert {name.decode() for name in part.ask("ZRANGE", f"{q}/e", 0, -1)} <= live
    done = {task_id for task_id in over if records[task_id][0] == _STATES.index("done")}
    assert set(part.pairs(f"{q}/p")) <= set(records) - done
    assert set(part.pairs(f"{q}/x")) <= set(records)
    kept = {name.decode() for name in part.ask("ZRANGE", f"{q}/k", 0, -1)}
    assert set(part.pairs(f"{q}/o")) <= kept <= set(records)
    ends = {
        (_STATES.index(state), item.decode())
        for state, name in _ENDS.items()
        for item in part.ask("LRANGE", f"{q}/{name}", 0, -1)
    }
    tags = part.pairs(f"{q}/I")
    assert set(tags) <= set(records)
    indexed = {
        f"{tag[:-1]}\0{seq}\0{i}"
        for i, packed in tags.items()
        for seq, *some in (packed.decode().split("\0"),)
        for tag in some
        if tag.endswith("\1")
    }
    assert {name.decode() for name in part.ask("ZRANGE", f"{q}/i", 0, -1)} == indexed
    keys = part.pairs(f"{q}/K")
    assert set(keys) <= {i for i, r in records.items() if _STATES[r[0]] != "replaced"}
    members = {name.decode() for name in part.ask("ZRANGE", f"{q}/U", 0, -1)}
    having = {f"{packed.decode().split(':', 3)[3]} {i}": packed for i, packed in keys.items()}
    assert members <= set(having)
    for (
        member,
        packed,
    ) in having.items():  # one that is given back by a delivery may have been removed
        assert member in members or packed[:1] == b"1" or member.split()[1] not in live
    for task_id in over - kept:
        at = int.from_bytes(records[task_id][25:32], "big")
        assert (records[task_id][0], f"{at}:{task_id}") in ends, "it is never forgotten"


class _Relative(NamedTuple):
    """What the record of a task says about those that wait for it, those that it waits for, and its batch."""

    state: str
    flags: int
    batch: str


def _relatives(part: _Partition, queues: set[str]) -> None:
    """Assert that every child will be told of the ends of its parents, and that batches are counted right."""
    told = {
        f"{key}/{task_id}": _relative(record)
        for key in queues
        for task_id, record in part.pairs(f"q:{key}/t").items()
    }
    noted: dict[str, set[str]] = {}
    for member in part.ask("ZRANGE", "children", 0, -1):
        parent, child, entry, _ = member.decode().split(" ")
        noted.setdefault(parent, set()).add(f"{child} {entry}")
    ends = {name.decode() for name in part.ask("ZRANGE", "ends", 0, -1)}
    for parent in noted:
        assert parent in ends or (parent in told and told[parent].flags & 1), "it tells nobody"
    lines = set(part.pairs("lines"))
    assert lines == ends | {name.decode() for name in part.ask("ZRANGE", "outbox", 0, -1)}
    kept = {name for name, relative in told.items() if relative.flags & 2}
    keys = part.connection.call("KEYS", f"{part.name}:q:*/w:*")
    found = {key.decode().removeprefix(f"{part.name}:q:").replace("/w:", "/") for key in keys}
    assert found == kept
    held: Counter[str] = Counter()
    for child in kept:
        key, _, task_id = child.partition("/")
        fields = part.pairs(f"q:{key}/w:{task_id}")
        if told[child].state != "blocked":
            assert "state" not in fields
            continue
        state = msgspec.msgpack.decode(fields.pop("state"))
        missing = {name for name in fields if "/" in name}
        assert len(missing) == state["n"]
        assert set(state["d"]) <= missing
        listed = part.ask("ZSCORE", f"q:{key}/blocked_on_dead", task_id) is not None
        assert listed == bool(state["d"])
        held[key] += listed
        for parent in missing:
            line = f"end {parent} {child}" in lines or f"register {parent} {child}" in lines
            waits = f"{child} {state['e']}" in noted.get(parent, ())
            assert line or waits, "it is never told"
    indexed = part.connection.call("KEYS", f"{part.name}:q:*/blocked_on_dead")
    assert len(indexed) == len(held.keys() - {key for key, n in held.items() if not n})
    for key, number in held.items():
        assert part.ask("ZCARD", f"q:{key}/blocked_on_dead") == number
    for batch, packed in part.pairs("batches").items():
        count = msgspec.msgpack.decode(packed)
        members = [one.state for one in told.values() if one.batch == batch]
        assert count["a"] - count["d"] - count["f"] == len(members)
        assert count["x"] == members.count("dead")


def _relative(record: bytes) -> _Relative:
    flags = record[_SIZE + 2] if len(record) > _SIZE else 0
    batch = record[_SIZE + 3 :].decode().split("/", 2)[2:]
    return _Relative(_STATES[record[0]], flags, batch[0] if batch else "")


def _housekept(part: _Partition, queues: set[str]) -> None:
    """Assert that the indexes used by maintenance have the right times for ended and for stalled tasks."""
    for key in queues:
        q = f"q:{key}"
        window = struct.unpack_from("<9d", part.ask("GET", f"{q}/n"))[-1]
        first = [item for name in _ENDS.values() if (item := part.ask("LINDEX", f"{q}/{name}", 0))]
        forget = part.ask("ZSCORE", "forget", key)
        told = None if forget is None else int(forget)
        due = min((int(item.split(b":")[0]) for item in first), default=None)
        kept = due is not None and int(part.ask("HGET", f"q:{key}", "keep_ended") or 0)
        assert kept or told == (None if due is None else due + window), "forget"
        assert not kept or told <= due + max(kept, window), "forget"
        hung, looks = part.first(f"{q}/m"), part.ask("ZSCORE", "processing", key)
        assert hung is None or (looks is not None and int(looks) <= hung), "processing"


def _flow(part: _Partition, q: str) -> tuple[float, ...]:
    return struct.unpack_from("<25d", part.ask("GET", f"{q}/f") or bytes(200))


def _recount_lanes(
    part: _Partition,
    q: str,
    numbers: dict[str, float],
    records: dict[str, bytes],
    flying: set[tuple[int, int]],
) -> int:
    """Check the sorted lanes of a queue, and return how many tasks wait for their ordering key."""
    resting_at = {
        (record[1], int.from_bytes(record[18:25], "big"))
        for record in records.values()
        if record[0] == 1 and record[1] in {1, 2}
    } - flying
    laned, tenants = 0, {name.decode() for name in part.ask("HKEYS", f"{q}/T")}
    resting = set(part.ask("ZRANGE", f"{q}/v", 0, -1))
    fair = bool(_flow(part, q)[8])
    for priority in range(10):
        told = part.ask("ZRANGE", f"{q}/w{priority}", 0, -1, "WITHSCORES")
        heads = {told[n]: int(told[n + 1]) for n in range(0, len(told), 2)}
        turns = set(part.ask("ZRANGE", f"{q}/g{priority}", 0, -1))
        assert turns <= set(heads) <= (turns | resting if fair else set(heads))
        for tenant, head in heads.items():
            lane = f"q{q[1:]}/y{priority}:{tenant.decode()}"
            first = part.first(lane)
            assert first is None or head <= first
            members = part.ask("ZRANGE", lane, 0, -1)
            assert {(" sr".index(chr(one[0])), int(one[1:])) for one in members} <= resting_at
            laned += len(members)
    told = part.ask("ZRANGE", f"{q}/J", 0, -1)
    for task_id in (name.decode() for name in told):
        entity = records[task_id][52:].decode().split("/")[1]
        assert part.ask("ZSCORE", f"{q}/j:{entity}", task_id), "it stands behind nobody"
        holder = part.ask("HGET", f"{q}/h", entity).decode()
        assert records[holder][0] in {1, 2}, "what holds the others up is over"
    marks = Counter[tuple[str, int]]()
    epoch = int(_flow(part, q)[-1])
    for record in records.values():
        if len(record) > _SIZE:
            mark = int.from_bytes(record[_SIZE : _SIZE + 2], "big")
            tenant = record[_SIZE + 3 :].decode().partition("/")[0]
            if epoch and mark // 4 == epoch:
                marks[tenant, mark % 4 - 1] += 1
                assert mark % 4 == 1 or (record[1], int.from_bytes(record[18:25], "big")) in flying
    for tenant in tenants:
        fresh, in_flight, *_ = struct.unpack("<5d", part.ask("HGET", f"{q}/T", tenant))
        assert (fresh, in_flight) == (marks[tenant, 0], marks[tenant, 1]), tenant
    assert {tenant for (tenant, _), number in marks.items() if number} <= tenants
    assert (numbers["laned"], numbers["held"]) == (laned, len(told))
    return len(told)


def _pending(part: _Partition, name: str) -> set[int]:
    number = part.ask("XPENDING", name, "g")[0]
    queue, _, lane = name.removeprefix("q:").rpartition("/")
    for _, member, *_ in part.ask("XINFO CONSUMERS", name, "g"):
        assert part.ask("SISMEMBER", f"o:{member.decode()}", lane + queue) == 1
    found = part.ask("XPENDING", name, "g", "-", "+", number or 1)
    return {int(entry.split(b"-")[0]) for entry, *_ in found}


def _consumers(part: _Partition, queues: set[str]) -> None:
    alive = [token.decode() for token in part.ask("ZRANGE", "alive", 0, -1)]
    subscribed = Counter(
        key.decode() for token in alive for key in part.ask("SMEMBERS", f"k:{token}")
    )
    told = {key: int(number) for key, number in part.pairs("subs").items()}
    assert told == dict(subscribed)
    for token in alive:
        assert part.ask("EXISTS", f"c:{token}") == 1
        assert {lane[2:].decode() for lane in part.ask("SMEMBERS", f"o:{token}")} <= queues

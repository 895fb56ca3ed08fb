"""Heaps of due times and lanes of tasks: a bounded number of stale entries is kept, and clearing keeps the order."""

from __future__ import annotations

import random
from typing import Any

from taskqueue_core.tasks import State, Task
from taskqueue_memory.due_heap import ROOM, DueHeap
from taskqueue_memory.lanes import Lane
from taskqueue_memory.records import QueueState, TaskRecord


def entry(seq: int, state: State = State.WAITING) -> TaskRecord:
    """Return a record with this sequence number and state."""
    record = TaskRecord(
        queue=QueueState("k"), task=Task(key="k", id=f"t{seq}"), state=state, seq=seq
    )
    record.available_at = float(seq)
    return record


def taken(lane: Lane[Any]) -> list[int]:
    """Take all waiting records from a lane, mark them in flight, and return their sequence numbers."""
    seqs = []
    while (record := lane.pop()) is not None:
        record.state = State.IN_FLIGHT
        seqs.append(record.seq)
    return seqs


def test_an_agenda_is_cleared_when_it_is_full() -> None:
    """When a heap is full, its stale entries are removed; the bound grows with the current entries (fault M5)."""
    matter: set[int] = set()
    agenda = DueHeap[int](lambda record, _mark: record in matter)
    for n in range(ROOM):
        agenda.add(n, n, n)
    assert len(agenda) == ROOM
    agenda.add(ROOM, ROOM, 0)
    assert len(agenda) == 1
    matter.update(range(ROOM, 2 * ROOM))
    for n in range(ROOM + 1, 2 * ROOM):
        agenda.add(n, n, n)
    for n in range(2 * ROOM, 4 * ROOM):  # the first of these clears the heap, which removes nothing
        agenda.add(n, n, n)
    assert len(agenda) == 3 * ROOM
    agenda.add(0, 0, 0)
    assert len(agenda) == ROOM + 1
    assert list(agenda.take(4 * ROOM)) == list(range(ROOM, 2 * ROOM))


def test_an_agenda_keeps_its_order_when_cleared() -> None:
    """Clearing stale entries from a heap keeps the others in the order of their times (fault M5)."""
    for seed in range(20):
        source = random.Random(seed)
        dates = source.sample(range(1000), ROOM)
        matter = set(source.sample(dates, ROOM // 2)) | {1000}
        agenda = DueHeap[int](lambda record, _mark, matter=matter: record in matter)  # type: ignore[misc]
        for at in (*dates, 1000):
            agenda.add(at, at, 0)
        assert len(agenda) == ROOM // 2 + 1
        assert list(agenda.take(1000)) == sorted(matter)


def test_a_lane_is_cleared_when_it_is_full() -> None:
    """Each part of a lane keeps a bounded number of stale entries: fresh, late and returned ones (fault M5)."""
    for add in (Lane.append, Lane.let_in, Lane.put_back):
        lane: Lane[Any] = Lane()
        for seq in range(ROOM):
            add(lane, entry(seq, State.DONE))
        assert _size(lane) == ROOM
        add(lane, entry(ROOM))
        assert _size(lane) == 1
    lane = Lane()
    for seq in range(0, ROOM, 2):
        lane.let_in(entry(seq, State.DONE))
        lane.put_back(entry(seq + 1, State.DONE))
    lane.let_in(entry(ROOM))
    assert _size(lane) == 1


def test_a_lane_has_twice_the_room_of_what_waits() -> None:
    """A lane with many waiting tasks is cleared less often, so that clearing stays cheap per added task (fault M5)."""
    lane: Lane[Any] = Lane()
    for seq in range(ROOM):
        lane.append(entry(seq, State.WAITING if seq < 10 else State.DONE))
    for seq in range(100, 120):
        lane.let_in(entry(seq))
    for seq in range(200, 230):
        lane.put_back(entry(seq))
    assert _size(lane) == ROOM + 50
    lane.append(entry(300, State.DONE))
    assert _size(lane) == 61
    most = 2 * 60 + ROOM
    for _ in range(most - len(lane._fresh)):
        lane.append(entry(300, State.DONE))
    assert _size(lane) == most + 50
    lane.append(entry(900))
    assert _size(lane) == 61
    assert taken(lane) == [*range(200, 230), *range(10), *range(100, 120), 900]


def test_a_lane_keeps_its_order_when_cleared() -> None:
    """Clearing keeps the remaining tasks of a lane in order, returned tasks first (fault M5)."""
    for seed in range(20):
        source = random.Random(seed)
        for add in (Lane.let_in, Lane.put_back):
            lane: Lane[Any] = Lane()
            stays = set(source.sample(range(ROOM), ROOM // 2)) | {ROOM}
            for seq in (*source.sample(range(ROOM), ROOM), ROOM):
                add(lane, entry(seq, State.WAITING if seq in stays else State.DONE))
            assert _size(lane) == ROOM // 2 + 1
            assert taken(lane) == sorted(stays)


def test_a_lane_merges_its_parts() -> None:
    """A lane gives returned tasks first and then all others by sequence number, however they were added (fault M5)."""
    lane: Lane[Any] = Lane()
    for seq in (2, 4, 7):
        lane.append(entry(seq))
    for seq in (3, 8, 6):
        lane.let_in(entry(seq))
    lane.put_back(entry(9))
    lane.put_back(entry(5))
    assert lane.oldest() == 2
    assert sorted(record.seq for record in lane.returned()) == [5, 9]
    assert sorted(record.seq for record in lane.others()) == [2, 3, 4, 6, 7, 8]
    assert taken(lane) == [5, 9, 2, 3, 4, 6, 7, 8]
    assert (_size(lane), lane.peek(), lane.oldest()) == (0, None, None)


def test_the_oldest_may_be_in_any_part() -> None:
    """The oldest waiting task of a lane is found in each of its three parts (fault M5)."""
    for oldest in (Lane.append, Lane.let_in, Lane.put_back):
        lane: Lane[Any] = Lane()
        for seq, add in enumerate((Lane.append, Lane.let_in, Lane.put_back), start=10):
            add(lane, entry(1 if add is oldest else seq))
        assert lane.oldest() == 1


def _size(lane: Lane[Any]) -> int:
    return len(lane._fresh) + len(lane._late) + len(lane._returned)

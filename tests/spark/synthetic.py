"""Journals generated from a seed together with the true verdict of every task, and functions that damage a journal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from taskqueue_spark.columns import TRANSITIONS

_START = 1_790_000_000_000_000
# for each letter: the event, the state after it, and the approximate seconds since the previous event
_EVENTS = {
    "p": ("published", "waiting", 0.0),
    "s": ("published", "scheduled", 0.0),
    "v": ("available", "waiting", 5.0),
    "d": ("delivered", "in_flight", 0.5),
    "a": ("acked", "done", 0.2),
    "r": ("redelivered", "waiting", 0.1),
    "l": ("lost", "waiting", 15.0),
    "t": ("retried", "scheduled", 0.2),
    "x": ("dead_lettered", "dead", 0.2),
    "y": ("redriven", "waiting", 60.0),
    "z": ("discarded", "discarded", 60.0),
    "e": ("expired", "expired", 10.0),
    "c": ("cancelled", "cancelled", 1.0),
    # published again, after the time in which the queue remembers the id
    "P": ("published", "waiting", 400.0),
}
_LETTERS = list(_EVENTS)
_NAMES = pa.array([event for event, _, _ in _EVENTS.values()])
_STATES = pa.array([state for _, state, _ in _EVENTS.values()])
_VERDICTS = {
    "waiting": "waiting",
    "scheduled": "scheduled",
    "in_flight": "in_flight",
    "done": "completed",
    "dead": "dead_lettered",
    "discarded": "discarded",
    "expired": "expired",
    "cancelled": "cancelled",
}


class Plan(NamedTuple):
    """A sequence of events, and the share of the tasks that go through it."""

    letters: str
    share: float


PLANS = (
    Plan("pda", 0.78),
    Plan("svda", 0.04),
    Plan("pdrda", 0.03),
    Plan("pdlda", 0.03),
    Plan("pdtvda", 0.04),
    Plan("pdx", 0.01),
    Plan("pdxyda", 0.01),
    Plan("pdxz", 0.005),
    Plan("pe", 0.01),
    Plan("pde", 0.005),
    Plan("pc", 0.01),
    Plan("p", 0.005),
    Plan("s", 0.003),
    Plan("pd", 0.002),
    Plan("pdt", 0.005),
    Plan("pdaPda", 0.01),
    Plan("pdatvda", 0.005),
)


class Made(NamedTuple):
    """A generated journal, and the correct result of its audit."""

    table: pa.Table
    """transitions in the schema `TRANSITIONS`, ordered by shard and number"""
    truth: Counter[tuple[str, str]]
    """number of lives by key and verdict"""


def made(
    seed: int,
    tasks: int,
    *,
    keys: int = 3,
    shards: int = 2,
    run: str = "r1",
    skew: float = 0.0,
    plans: tuple[Plan, ...] = PLANS,
) -> Made:
    """Generate a journal of a correct queue.

    ``skew`` is the share of tasks that the first key gets in addition to an equal part. Tasks of a queue are first
    delivered in the order of publishing, each step takes some time, and no row is missing.
    """
    chance = np.random.default_rng(seed)
    shares = np.array([plan.share for plan in plans])
    kind = chance.choice(len(plans), tasks, p=shares / shares.sum())
    key = np.where(chance.random(tasks) < skew, 0, chance.integers(0, keys, tasks))
    born = np.cumsum(chance.integers(100, 2000, tasks))
    sizes = np.array([len(plan.letters) for plan in plans])
    task = np.repeat(np.arange(tasks), sizes[kind])
    place = np.arange(len(task)) - np.repeat(np.cumsum(sizes[kind]) - sizes[kind], sizes[kind])
    table = np.full((len(plans), int(sizes.max())), -1)
    for number, plan in enumerate(plans):
        table[number, : len(plan.letters)] = [_LETTERS.index(letter) for letter in plan.letters]
    letter = table[kind[task], place]
    usual = np.array([round(1e6 * seconds) for _, _, seconds in _EVENTS.values()])
    lasts = np.maximum(1, usual[letter] * chance.uniform(0.9, 1.1, len(letter))).astype(np.int64)
    # deliveries have a fixed delay, so that tasks of a queue keep their order
    lasts[letter == _LETTERS.index("d")] = usual[_LETTERS.index("d")]
    ends = np.cumsum(lasts)
    first = place == 0
    began = np.maximum.accumulate(np.where(first, np.arange(len(task)), 0))
    at = _START + born[task] + ends - ends[began]
    scheduled = np.isin(letter, [_LETTERS.index(one) for one in "st"])
    attempt = 1 + _running(letter == _LETTERS.index("t"), began)
    attempt[_second_life(letter, began)] = 1
    losses = _running(letter == _LETTERS.index("l"), began)
    shard = (key % shards)[task]
    order = np.lexsort((task, at, shard))
    shard = shard[order]
    due = np.where(scheduled, np.append(at[1:], at[-1:]), 0)
    due[scheduled & (np.append(place[1:], 0) == 0)] += 3_600_000_000
    counts = np.bincount(shard, minlength=shards)
    seq = np.concatenate([np.arange(1, count + 1) for count in counts])
    truth: Counter[tuple[str, str]] = Counter()
    for number, plan in enumerate(plans):
        for one in range(keys):
            count = int(((kind == number) & (key == one)).sum())
            for end in _ends(plan.letters):
                truth[f"k{one}", end] += count
    return Made(_table(run, shard, seq, letter, task, key, at, attempt, losses, due, order), +truth)


def _running(flags: np.ndarray, began: np.ndarray) -> np.ndarray:
    """Return the running count of set flags within each task."""
    total: np.ndarray = np.cumsum(flags)
    before: np.ndarray = (total - flags)[began]
    running: np.ndarray = total - before
    return running


def _second_life(letter: np.ndarray, began: np.ndarray) -> np.ndarray:
    lives: np.ndarray = _running(letter == _LETTERS.index("P"), began)
    return lives > 0


def _ends(letters: str) -> list[str]:
    """Return the verdict of each life of a task with these events."""
    found, over = [], False
    for letter in letters:
        if letter == "P" or (letter == "t" and over):
            found.append("completed")
        over = letter in "aecz"
    return [*found, _VERDICTS[_EVENTS[letters[-1]][1]]]


def _table(
    run: str,
    shard: np.ndarray,
    seq: np.ndarray,
    letter: np.ndarray,
    task: np.ndarray,
    key: np.ndarray,
    at: np.ndarray,
    attempt: np.ndarray,
    losses: np.ndarray,
    due: np.ndarray,
    order: np.ndarray,
) -> pa.Table:
    letter, task, at = letter[order], task[order], at[order]
    number = len(order)
    names = pa.array([f"t{one:09d}" for one in range(int(task.max()) + 1)])
    tenants = pa.array([f"tenant{one}" for one in range(4)])
    begins = np.isin(letter, [_LETTERS.index(one) for one in "psP"])
    worked = np.isin(letter, [_LETTERS.index(one) for one in "darltx"])
    failed = np.isin(letter, [_LETTERS.index(one) for one in "tx"])
    workers = pa.array([f"w{one}" for one in range(8)])
    moments = pa.array(due[order], pa.int64(), mask=due[order] == 0)
    columns = {
        "shard": pa.array(shard, pa.int32()),
        "run": pa.repeat(run, number),
        "seq": pa.array(seq, pa.int64()),
        "ts": pa.array(at, pa.int64()).cast(TRANSITIONS.field("ts").type),
        "event": _NAMES.take(pa.array(letter)),
        "key": pa.array([f"k{one}" for one in range(int(key.max()) + 1)]).take(pa.array(key[task])),
        "task_id": names.take(pa.array(task)),
        "attempt": pa.array(attempt[order], pa.int32()),
        "losses": pa.array(losses[order], pa.int32()),
        "state": _STATES.take(pa.array(letter)),
        "priority": pa.array(np.full(number, 5), pa.int8()),
        "tenant": pc.if_else(pa.array(begins), tenants.take(pa.array(task % 4)), None),
        "ordering_key": pa.nulls(number, pa.string()),
        "worker": pc.if_else(pa.array(worked), workers.take(pa.array(task % 8)), None),
        "error": pc.if_else(pa.array(failed), "ValueError: no such thing", None),
        "reason": pa.nulls(number, pa.string()),
        "due_at": moments.cast(TRANSITIONS.field("due_at").type),
        "digest": pa.nulls(number, pa.string()),
    }
    return pa.table([columns[name] for name in TRANSITIONS.names], schema=TRANSITIONS)


# Functions that damage a journal


def _row(table: pa.Table, event: str, nth: int) -> int:
    """Return the index of the nth row with this event, among tasks that have the event once.

    An "acked" row found is the last of its task, and the last row of a "delivered" row's task is an ack, so there is no
    retry.
    """
    ids = table["task_id"].to_pylist()
    places = np.flatnonzero(pc.equal(table["event"], event).to_numpy()).tolist()
    times = Counter(ids[place] for place in places)
    last = {name: place for place, name in enumerate(ids)}
    acked = set(np.flatnonzero(pc.equal(table["event"], "acked").to_numpy()).tolist())
    behind = {"acked": lambda one, end: one == end, "delivered": lambda _, end: end in acked}
    fits: Callable[[int, int], bool] = behind.get(event, lambda *_: True)
    once = [one for one in places if times[ids[one]] == 1 and fits(one, last[ids[one]])]
    return int(once[nth])


def removed(table: pa.Table, event: str = "acked", nth: int = 0) -> tuple[pa.Table, str]:
    """Remove one row, so that its number is missing. Return the table and the id of the row's task."""
    place = _row(table, event, nth)
    rest = pa.concat_tables([table.slice(0, place), table.slice(place + 1)])
    return rest, table["task_id"][place].as_py()


def renumbered(table: pa.Table) -> pa.Table:
    """Renumber the rows of each shard without gaps, as if removed rows had never been recorded."""
    shard = table["shard"].to_numpy()
    seq = table["seq"].to_numpy()
    order = np.lexsort((seq, shard))
    numbers = np.empty(len(seq), np.int64)
    for one in np.unique(shard):
        places = order[shard[order] == one]
        numbers[places] = np.arange(1, len(places) + 1)
    return _with(table, "seq", pa.array(numbers))


def doubled(table: pa.Table, event: str = "acked", nth: int = 0) -> tuple[pa.Table, str]:
    """Repeat one row at the end of its shard. Return the table and the id of the row's task."""
    place = _row(table, event, nth)
    row = table.slice(place, 1)
    same = pc.equal(table["shard"], row["shard"][0])
    last = pc.max(table.filter(same)["seq"]).as_py()
    row = _with(row, "seq", pa.array([last + 1], pa.int64()))
    row = _with(row, "ts", pa.chunked_array([[pc.max(table["ts"])]], TRANSITIONS.field("ts").type))
    return pa.concat_tables([table, row]), row["task_id"][0].as_py()


def swapped(table: pa.Table, event: str = "acked", nth: int = 0) -> tuple[pa.Table, str, str]:
    """Replace the task id of one row. Return the table, the old id and the new id."""
    place = _row(table, event, nth)
    ids = table["task_id"].to_pylist()
    was, ids[place] = ids[place], "changeling"
    return _with(table, "task_id", pa.array(ids)), was, "changeling"


def cut(table: pa.Table, shard: int, first: int, last: int) -> pa.Table:
    """Remove the rows of a shard from number ``first`` to ``last``; from number 1 on this is what trimming does."""
    of = pc.equal(table["shard"], shard)
    within = pc.and_(pc.greater_equal(table["seq"], first), pc.less_equal(table["seq"], last))
    return table.filter(pc.invert(pc.and_(of, within)))


def repeated(table: pa.Table, first: int, number: int) -> pa.Table:
    """Repeat rows with their numbers, as if a file had been copied."""
    return pa.concat_tables([table, table.slice(first, number)])


def moved(table: pa.Table, name: str, place: int) -> pa.Table:
    """Give the journal a run, keys and shards of its own, so that several journals can be queried together."""
    number = len(table)
    table = _with(table, "run", pa.repeat(name, number))
    table = _with(table, "key", pc.binary_join_element_wise(name, table["key"], "/"))
    return _with(table, "shard", pc.add(table["shard"], pa.scalar(10 * (place + 1), pa.int32())))


def _with(table: pa.Table, name: str, values: pa.Array | pa.ChunkedArray) -> pa.Table:
    return table.set_column(TRANSITIONS.get_field_index(name), TRANSITIONS.field(name), values)

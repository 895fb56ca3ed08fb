"""Rules of order: R7, R8, priority classes, the floor share of each priority, and fair turns of tenants."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from tests.chaos.history import What
from tests.chaos.rules_time import in_force
from tests.chaos.story import Dump, Handout, History, Story, Terms, Violation

_INF = float("inf")
_ROUNDING = 0.002
"""seconds of tolerance, because the store may round times to milliseconds"""
_CLOCKS = 0.1
"""maximum seconds by which readings of two clocks of one machine may differ"""
_PROMOTION = 0.5
"""maximum seconds between the due time of a scheduled task and its entry into the order"""
_SHARE = 0.8
"""fraction of its promised share that a priority must have received"""
_OWED = 3.0
"""number of deliveries by which a priority may lag behind its share, because others begin and cease to wait"""
_SWAP = 1.0
"""seconds after a change of the order during which either order is accepted"""
_SHARD = re.compile(r"<s\d+@(\d+)x")
"""how the receipts of a sharded queue begin, with the number of the generation"""
_TURNS = 2.0
"""number of extra deliveries allowed to a tenant, which may just have had its turn or be about to have it"""


class _Place(NamedTuple):
    """When a task became available, and its first delivery."""

    early: float
    """earliest time at which the task may have become available"""
    late: float
    """latest time at which it became available; infinity if unknown"""
    due: float
    """time on the store's clock for which it was scheduled; 0 if it was not"""
    number: int
    """position of its publish among all events, ordered by call"""
    first: Handout
    story: Story


def _places(history: History, *, strict: bool) -> list[_Place]:
    """Return the tasks whose first delivery is certainly known, and when they became available.

    If a receive failed meanwhile, the task may have been delivered before without any record, so it is left out.
    """
    found: list[_Place] = []
    number = {id(event): place for place, event in enumerate(history.events)}
    for story in history.stories.values():
        first = story.handouts[0] if story.handouts else None
        if first is None or first.first.losses or first.first.attempt > 1:
            continue
        stored = [one for one in story.publications if one.maybe]
        if not stored or (len(stored) > 1 and not any(one.outcome == "accepted" for one in stored)):
            continue  # it is not known which of its publishes stored the task
        one = next((one for one in stored if one.outcome == "accepted"), stored[0])
        if any(other.called.at < one.called.at for other in stored):
            one = stored[0]
        called = one.called
        if called.origin:
            continue  # it becomes available some time after its publish
        answered = one.answered.at if one.answered and one.stored else _INF
        if len(stored) > 1:
            answered = max((s.answered.at for s in stored if s.answered), default=_INF)
        due = (called.not_before or 0.0) - history.wall
        early = max(called.at, due)
        late = max(answered, due + _PROMOTION) if called.not_before else answered
        if not strict and history.blind(called.at, first.first.at):
            continue
        due = called.not_before or 0.0
        found.append(_Place(early, late, due, number[id(called)], first, story))
    return found


def r7(history: History, _dump: Dump, terms: Terms) -> Iterator[Violation]:
    """R7: first deliveries in a lane follow the order in which its tasks became available.

    The order is known within a batch, and if one publish was answered before another was called. A lane is a priority,
    or a tenant within a priority if the queue's order was fair at any time. A task with an ordering key may be
    overtaken, because it waits for others of its key, but it must not overtake.
    """
    lanes: defaultdict[tuple[str, int, str], list[_Place]] = defaultdict(list)
    by_tenant = history.setting("fair")
    for place in _places(history, strict=terms.strict_order):
        story = place.story
        tenant = story.tenant if story.key in by_tenant else ""
        lanes[story.key, place.story.priority, tenant].append(place)
    for lane in lanes.values():
        yield from _overtaken("R7", lane, [one for one in lane if not one.story.ordering_key])
        yield from _shuffled("R7", lane)


def _overtaken(rule: str, lane: list[_Place], before: list[_Place]) -> Iterator[Violation]:
    """Yield tasks that were delivered before a task whose publish had been answered before theirs was called.

    A scheduled task counts only from its time on the store's clock, which may have fallen behind: if Redis is down and
    its clock is set back, the store's time continues from its last value.
    """
    pending = sorted(before, key=lambda one: one.late)
    at = 0
    last: dict[bool, _Place] = {}
    for one in sorted(lane, key=lambda one: one.early):
        while at < len(pending) and pending[at].late < one.early:
            other = pending[at]
            found = last.get(other.due > 0)
            if found is None or other.first.store_at > found.first.store_at:
                last[other.due > 0] = other
            at += 1
        for other in last.values():
            early = other.first.store_at - one.first.store_at
            if early > 0 and one.first.store_at >= other.due:
                text = f"first delivered {early:.4f} s before {other.story.name}, which was there earlier"
                yield Violation(rule, text, one.story.name)
                break


def _shuffled(rule: str, lane: list[_Place], *, one_key: bool = False) -> Iterator[Violation]:
    """Yield tasks that were delivered before a task that precedes them in the same batch."""
    last: dict[tuple[str, int], tuple[Handout, Story]] = {}
    for one in sorted(lane, key=lambda one: one.number):
        first, story = one.first, one.story
        called = story.publications[0].called
        if called.not_before is not None or len(story.publications) > 1:
            continue
        batch = called.by, called.call
        before, other = last.get(batch, (first, story))
        same = before.first.by == first.first.by and before.store_at == first.store_at
        if before.store_at > first.store_at or (same and before.first.at > first.first.at):
            text = f"first delivered before {other.name}, which stands before it in its batch"
            yield Violation(rule, text, story.name)
        elif one_key or not story.ordering_key:
            last[batch] = first, story


def r8(history: History, dump: Dump, terms: Terms) -> Iterator[Violation]:
    """R8: of tasks with one ordering key, the next is delivered only when the previous has ended, and in order.

    Exception: a task scheduled in an old shard that falls due after the number of shards has changed may be delivered
    before, or while, a task of a new shard is.
    """
    sharded = history.setting("shards")
    keys: defaultdict[tuple[str, str], list[tuple[Handout, Story]]] = defaultdict(list)
    for story in history.stories.values():
        for handout in story.handouts if story.ordering_key else ():
            keys[story.key, story.ordering_key].append((handout, story))
    for (_, ordering_key), handouts in keys.items():
        handouts.sort(key=lambda pair: pair[0].order)
        holder: tuple[Handout, Story] | None = None
        for handout, story in handouts:
            if (
                holder is not None
                and story is not holder[1]
                and not _due_late(holder, (handout, story))
            ):
                by = min(handout.first.at, handout.store_at - history.wall + _CLOCKS)
                if not _may_have_ended(history, dump, holder[1], holder[0], by):
                    text = f"handed out before {holder[1].name} had ended, under the ordering key {ordering_key}"
                    yield Violation("R8", text, story.name, terms.waives(handout.first.at))
            holder = handout, story
    lanes: defaultdict[tuple[str, str], list[_Place]] = defaultdict(list)
    for place in _places(history, strict=terms.strict_order):
        scheduled = place.first.first.key in sharded and place.story.scheduled
        if place.story.ordering_key and not scheduled:
            lanes[place.story.key, place.story.ordering_key].append(place)
    for lane in lanes.values():
        yield from _overtaken("R8", lane, lane)
        yield from _shuffled("R8", lane, one_key=True)


def _due_late(*pair: tuple[Handout, Story]) -> bool:
    """Return whether two deliveries are of shards of different generations, and the older shard's task was scheduled.

    Such a task keeps no shard waiting, because it may be due in days.
    """
    (earlier, story), (later, _) = sorted(
        ((_generation(handout.first.receipt), story) for handout, story in pair),
        key=lambda one: one[0],
    )
    return earlier < later and story.scheduled


def _generation(receipt: str) -> int:
    """Return the generation of the shard that issued a receipt; 0 for a queue that was not sharded."""
    found = _SHARD.match(receipt)
    return 0 if found is None else int(found[1])


def _may_have_ended(history: History, dump: Dump, story: Story, last: Handout, by: float) -> bool:
    """Return whether a delivered task may have ended by the given time."""
    for _, one in story.settlements:
        ending = one.verb in {"ack", "dead_letter"} or one.outcome == "dead"
        if ending and one.outcome != "lease_lost" and one.called.at <= by:
            return True
    deadlines = [one.called.deadline for one in story.publications if one.maybe]
    if any(one is not None and one - history.wall <= by + _CLOCKS for one in deadlines):
        return True
    if any(e.what in {What.CANCEL, What.DISCARD} and e.at <= by for e in story.operators):
        return True
    # It is not recorded which loss was one too many, only that the task became a dead letter.
    known = dump.known(story.key, story.task)
    died = known is not None and known.state == "dead"
    redriven = history.revived(story, last.first.at, _INF)
    return (died or redriven) and any(
        history.harmed(holder, since, by) for since, holder in last.holders
    )


class _Queue(NamedTuple):
    """The deliveries of one queue in the store's order, and the tasks that were certainly available."""

    handouts: list[tuple[float, Story]]
    waits: list[_Place]


def _queues(history: History) -> dict[str, _Queue]:
    queues: defaultdict[str, _Queue] = defaultdict(lambda: _Queue([], []))
    found = [(one, story) for story in history.stories.values() for one in story.handouts]
    for one, story in sorted(found, key=lambda pair: pair[0].order):
        queues[story.key].handouts.append((one.store_at - history.wall, story))
    for place in _places(history, strict=False):
        if place.late < _INF and not place.story.ordering_key:
            queues[place.story.key].waits.append(place)
    return queues


def _held_up(history: History, key: str) -> bool:
    """Return whether limits per tenant may hold up a tenant, so that others may be served first."""
    names = ("tenant_limit", "tenant_rate")
    return any(e.value is not None for name in names for e in history.setting(name).get(key, ()))


def classes(history: History, _dump: Dump, _terms: Terms) -> Iterator[Violation]:
    """Rule class: a lower priority is not delivered while a higher one certainly waits, unless a floor share is set."""
    for key, queue in _queues(history).items():
        floors = [e for e in history.setting("floor").get(key, ()) if e.value]
        if floors or _held_up(history, key):
            continue
        for priority in {one.story.priority for one in queue.waits}:
            waits = sorted(
                (one.late + _CLOCKS, one.first.store_at - history.wall - _ROUNDING, one.story.name)
                for one in queue.waits
                if one.story.priority == priority
            )
            since = [wait[0] for wait in waits]
            longest = list(accumulate(((out, name) for _, out, name in waits), max))
            for at, story in queue.handouts:
                place = bisect_left(since, at)
                if story.priority < priority and place and longest[place - 1][0] > at:
                    text = f"handed out while {longest[place - 1][1]} of priority {priority} waited"
                    yield Violation("class", text, story.name)
                    break


def floor(history: History, _dump: Dump, _terms: Terms) -> Iterator[Violation]:
    """Rule floor: while tasks of a priority wait, they get their share of the deliveries."""
    queues = _queues(history)
    for key, since, until, share in in_force(history, "floor"):
        queue = queues.get(key)
        if queue is None or not share or not queue.waits or _held_up(history, key):
            continue
        priorities = {story.priority for _, story in queue.handouts}
        least = min(share, 1 / len(priorities))
        for priority in priorities:
            spans = _merged(
                (max(one.late, since), min(one.first.store_at - history.wall, until))
                for one in queue.waits
                if one.story.priority == priority
            )
            for begin, end in spans:
                if not (history.blind(begin, end) or _paused(history, key, begin, end)):
                    owed = _most_owed(queue, priority, least, begin, end)
                    if owed > _OWED:
                        text = f"priority {priority} waits for {owed:.1f} hand-outs, its share is {least:g}"
                        yield Violation("floor", text, key)


def _most_owed(queue: _Queue, priority: int, share: float, begin: float, end: float) -> float:
    """Return the largest number of deliveries by which a priority lagged behind its share in a time span."""
    most = owed = 0.0
    for at, story in queue.handouts:
        if begin + _ROUNDING < at <= end:
            own = story.priority == priority
            owed = max(0.0, owed - 1.0) if own else owed + _SHARE * share
            most = max(most, owed)
    return most


def _paused(history: History, key: str, begin: float, end: float) -> bool:
    return any(e.key == key and begin <= e.at <= end for e in history.of(What.PAUSE, What.RESUME))


def _merged(spans: Iterator[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Merge overlapping time spans."""
    begin, end = _INF, -_INF
    for since, until in sorted(span for span in spans if span[0] < span[1]):
        if since > end > begin:
            yield begin, end
        begin, end = (since, until) if since > end else (begin, max(end, until))
    if end > begin:
        yield begin, end


def fair(history: History, _dump: Dump, _terms: Terms) -> Iterator[Violation]:
    """Rule fair: with fair order, while a tenant waits, no other tenant gets more than its turns."""
    queues = _queues(history)
    for key, since, until, _ in in_force(history, "fair"):
        queue = queues.get(key)
        if queue is None or _held_up(history, key):
            continue
        weights = {e.target: e.value or 1.0 for e in history.setting("weight").get(key, ())}
        begin = since + (_SWAP if any(one.early < since for one in queue.waits) else 0.0)
        for lane in {story.priority for _, story in queue.handouts}:
            handouts = [(at, s.tenant) for at, s in queue.handouts if s.priority == lane]
            waits = [one for one in queue.waits if one.story.priority == lane]
            yield from _passed_over(history, handouts, waits, (begin, until), weights)


def _passed_over(
    history: History,
    handouts: Sequence[tuple[float, str]],
    waits: Sequence[_Place],
    span: tuple[float, float],
    weights: dict[str, float],
) -> Iterator[Violation]:
    times = [at for at, _ in handouts]
    own: defaultdict[str, list[float]] = defaultdict(list)
    for at, tenant in handouts:
        own[tenant].append(at)
    for one in waits:
        tenant, out = one.story.tenant, one.first.store_at - history.wall
        mine = own[tenant]
        place = bisect_left(mine, out - _ROUNDING)
        begin = max(one.late, span[0], mine[place - 1] if place else -_INF) + _ROUNDING
        end = min(out - _ROUNDING, span[1])
        if begin >= end or history.blind(begin, out):
            continue
        others = Counter(
            other
            for _, other in handouts[bisect_right(times, begin) : bisect_left(times, end)]
            if other != tenant
        )
        for other, count in others.items():
            turns = weights.get(other, 1.0) / weights.get(tenant, 1.0)
            if count > turns + _TURNS:
                text = f"{other} had {count} hand-outs while {tenant} waited for one"
                yield Violation("fair", text, one.story.name)

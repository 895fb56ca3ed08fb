"""Rules R7 to R13: order, due times, limits, pauses and deadlines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise, zip_longest

from tests.chaos.history import What
from tests.chaos.story import Dump, Handout, History, Story, Terms, Violation

__all__ = ["in_flight", "r7", "r8", "r9", "r10", "r11", "r12", "r13"]

_INF = float("inf")
_ROUNDING = 0.002
"""the store may keep times in milliseconds"""
_CLOCKS = 0.1
"""how far two readings of one machine's clocks may be apart"""
_PROMOTION = 0.5
"""how long after its time a scheduled task may take its place in the order"""


def r7(history: History, _dump: Dump, terms: Terms) -> Iterator[Violation]:
    """First deliveries of a lane are in the order in which its tasks became available.

    That order is known where one publish was answered before another was called, and within a batch.
    A task that may have been handed out before, unseen, has no first delivery that we know of.
    """
    lanes: defaultdict[tuple[str, int], list[tuple[float, float, int, Handout, Story]]]
    lanes = defaultdict(list)
    place = {id(event): number for number, event in enumerate(history.events)}
    for story in history.stories.values():
        first = story.handouts[0] if story.handouts else None
        if first is None or first.first.losses or first.first.attempt > 1:
            continue
        stored = [one for one in story.publications if one.maybe]
        if not stored or (len(stored) > 1 and not any(one.outcome == "accepted" for one in stored)):
            continue  # which of its publishes counted is not known
        one = next((one for one in stored if one.outcome == "accepted"), stored[0])
        if any(other.called.at < one.called.at for other in stored):
            one = stored[0]
        called = one.called
        answered = one.answered.at if one.answered and one.stored else _INF
        if len(stored) > 1:
            answered = max((s.answered.at for s in stored if s.answered), default=_INF)
        due = (called.not_before or 0.0) - history.wall
        early = max(called.at, due)
        late = max(answered, due + _PROMOTION) if called.not_before else answered
        if not terms.strict_order and history.blind(called.at, first.first.at):
            continue
        lanes[story.key, called.priority].append((early, late, place[id(called)], first, story))
    for lane in lanes.values():
        yield from _overtaken(lane)
        yield from _shuffled(lane)


def _overtaken(
    lane: list[tuple[float, float, int, Handout, Story]],
) -> Iterator[Violation]:
    """A task whose publish was called after another's was answered, and which came first all the same."""
    pending = sorted(lane, key=lambda one: one[1])
    at = 0
    last: tuple[float, Story] | None = None
    for early, _, _, first, story in sorted(lane, key=lambda one: one[0]):
        while at < len(pending) and pending[at][1] < early:
            _, _, _, other, before = pending[at]
            if last is None or other.store_at > last[0]:
                last = other.store_at, before
            at += 1
        if last is not None and first.store_at < last[0]:
            text = f"first delivered {last[0] - first.store_at:.4f} s before {last[1].name}, which was there earlier"
            yield Violation("R7", text, story.name)


def _shuffled(
    lane: list[tuple[float, float, int, Handout, Story]],
) -> Iterator[Violation]:
    """A task that came before another one that stands before it in their common batch."""
    last: dict[tuple[str, int], tuple[Handout, Story]] = {}
    for _, _, _, first, story in sorted(lane, key=lambda one: one[2]):
        called = story.publications[0].called
        if called.not_before is not None or len(story.publications) > 1:
            continue
        batch = called.by, called.call
        before, other = last.get(batch, (first, story))
        same = before.first.by == first.first.by and before.store_at == first.store_at
        if before.store_at > first.store_at or (same and before.first.at > first.first.at):
            text = f"first delivered before {other.name}, which stands before it in its batch"
            yield Violation("R7", text, story.name)
        else:
            last[batch] = first, story


def r8(history: History, _dump: Dump, _terms: Terms) -> Iterator[Violation]:
    """Tasks with one ordering key, in a queue that is serial, are never in flight side by side."""
    serial = history.setting("serial")
    keys: defaultdict[tuple[str, str], list[tuple[Handout, Story]]] = defaultdict(list)
    for story in history.stories.values():
        for handout in story.handouts:
            ordering_key = story.publications[0].called.ordering_key if story.publications else ""
            if ordering_key and story.key in serial:
                keys[story.key, ordering_key].append((handout, story))
    for (_, ordering_key), handouts in keys.items():
        handouts.sort(key=lambda pair: pair[0].order)
        for (handout, story), (later, other) in pairwise(handouts):
            if story is not other and _until(history, story, handout) > later.first.at:
                text = f"in flight beside {story.name} under the ordering key {ordering_key}"
                yield Violation("R8", text, other.name)


def _until(history: History, story: Story, handout: Handout) -> float:
    """When, at the earliest, a hand-out may have ended: before that it was certainly in flight."""
    ends = [handout.settled_at]
    ends += [later.first.at for later in story.handouts if later.order > handout.order]
    for since, by in handout.holders:
        ends += [max(begin, since) for begin, over in history.harm.get(by, ()) if over >= since]
        ends += [e.at for e in history.of(What.CLOSE) if e.by == by and e.at >= since]
    ends += [e.at for e in history.of(What.REVOKED) if e.receipt == handout.first.receipt]
    return min(ends)


def r9(history: History, _dump: Dump, _terms: Terms) -> Iterator[Violation]:
    """Nothing is delivered before its time: by the store's clock, and by ours."""
    for story in history.stories.values():
        for handout in story.handouts:
            due = _due(story, handout)
            if due is None:
                continue
            if handout.store_at < due - _ROUNDING:
                text = f"attempt {handout.first.attempt} came {due - handout.store_at:.4f} s early"
                yield Violation("R9", text, story.name)
            elif history.wall and handout.first.at + history.wall < due - _CLOCKS:
                yield Violation("R9", "came early, and the store says that it did not", story.name)


def _due(story: Story, handout: Handout) -> float | None:
    attempt = handout.first.attempt
    if attempt == 1:
        times = [one.called.not_before for one in story.publications if one.maybe]
    else:
        times = [
            one.called.due
            for before, one in story.settlements
            if one.verb == "retry"
            and one.outcome != "lease_lost"
            and before.first.attempt == attempt - 1
        ]
        times += [
            e.due for e in story.operators if e.what is What.RETRY and e.at < handout.first.at
        ]
    known = [time for time in times if time is not None]
    return min(known) if known and len(known) == len(times) else None


def r10(history: History, _dump: Dump, _terms: Terms) -> Iterator[Violation]:
    """No more is in flight than the queue's limit allows.

    What was in flight when a limit was lowered may go on, so only those count that were handed out since.
    """
    for key, since, until, limit in _in_force(history, "limit"):
        for at, issued, running in in_flight(history, key):
            if running > limit and issued > since + _ROUNDING and at < until:
                text = f"{running} in flight at {at:.4f}, {limit:g} are allowed"
                yield Violation("R10", text, key)
                break


def in_flight(history: History, key: str) -> Iterator[tuple[float, float, int]]:
    """Yield each hand-out of a queue: when it was seen, when it was made, and how many are certainly in flight then."""
    moments: list[tuple[float, int, float]] = []
    for story in history.stories.values():
        for handout in story.handouts if story.key == key else ():
            seen = handout.first.at
            moments.append((seen, 1, handout.store_at - history.wall))
            moments.append((max(_until(history, story, handout), seen), -1, 0.0))
    running = 0
    for at, step, issued in sorted(moments):
        running += step
        if step > 0:
            yield at, issued, running


def _in_force(history: History, name: str) -> Iterator[tuple[str, float, float, float]]:
    """Yield each span of a limit: its key, since when and until when it was certainly in force, and its value."""
    for key, changes in history.setting(name).items():
        for change, following in zip_longest(changes, changes[1:]):
            if change.value is not None:
                yield key, change.at, following.at if following else _INF, change.value


def r11(history: History, _dump: Dump, _terms: Terms) -> Iterator[Violation]:
    """In every window of w seconds at most burst + rate * w deliveries."""
    bursts = list(_in_force(history, "burst"))
    for key, since, until, rate in _in_force(history, "rate"):
        burst = max(
            (size for name, begin, over, size in bursts if name == key and begin < until and over > since),
            default=0.0,
        )  # fmt: skip
        times = sorted(
            handout.store_at
            for story in history.stories.values()
            if story.key == key
            for handout in story.handouts
            if since + _ROUNDING < handout.store_at - history.wall < until
        )
        level, last = 0.0, times[0] if times else 0.0
        for at in times:
            level = max(0.0, level - rate * (at - last)) + 1.0
            last = at
            if level > burst + rate * _ROUNDING + 1e-6:
                text = f"a burst of {level:.2f} at {at:.4f}, {burst:g} allowed"
                yield Violation("R11", text, key)
                break


def r12(history: History, _dump: Dump, _terms: Terms) -> Iterator[Violation]:
    """Nothing is handed out once a pause is confirmed, be it for the first time or again."""
    for paused in history.of(What.PAUSED):
        over = next(
            (e.at for e in history.of(What.RESUME) if e.key == paused.key and e.at > paused.at),
            _INF,
        )
        since = paused.store_at if paused.store_at is not None else paused.at + history.wall
        until = over + history.wall
        for story in history.stories.values():
            for handout in story.handouts if story.key == paused.key else ():
                if since + _ROUNDING < handout.store_at < until - _ROUNDING:
                    yield Violation("R12", f"delivered while {paused.key} was paused", story.name)


def r13(history: History, _dump: Dump, _terms: Terms) -> Iterator[Violation]:
    """Nothing is delivered at or after its deadline."""
    for story in history.stories.values():
        limits = [one.called.deadline for one in story.publications if one.maybe]
        known = [limit for limit in limits if limit is not None]
        if not known or len(known) < len(limits):
            continue
        for handout in story.handouts:
            if handout.store_at >= max(known):
                late = handout.store_at - max(known)
                yield Violation("R13", f"delivered {late:.4f} s after its deadline", story.name)

"""Rules R9 to R13: due times, limits, pauses and deadlines."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

from tests.chaos.history import What
from tests.chaos.story import Dump, Handout, History, Story, Terms, Violation

_INF = float("inf")
_ROUNDING = 0.002
"""seconds of tolerance, because the store may round times to milliseconds"""
_CLOCKS = 0.1
"""maximum seconds by which readings of two clocks of one machine may differ"""


def r9(history: History, _dump: Dump, _terms: Terms) -> Iterator[Violation]:
    """R9: a task is not delivered before it is due, by the store's clock and by the consumer's."""
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
    """R10: no more tasks are in flight than the queue's limit allows.

    Tasks that were in flight when a limit was lowered may finish, so only later deliveries can break the rule. Limits
    per tenant ignore tasks that were in flight before.
    """
    for key, tenant, name in _limited(history, "limit"):
        for _, since, until, limit in in_force(history, name, key):
            counted = since if tenant is not None else -_INF
            for at, issued, running in in_flight(history, key, tenant, since=counted):
                if running > limit and issued > since + _ROUNDING and at < until:
                    text = f"{running} in flight at {at:.4f}, {limit:g} are allowed"
                    yield Violation("R10", text, _whose(key, tenant))
                    break


def in_flight(
    history: History, key: str, tenant: str | None = None, *, since: float = -_INF
) -> Iterator[tuple[float, float, int]]:
    """Yield for each delivery of a queue or tenant when it was seen, when it was made, and how many are in flight."""
    moments: list[tuple[float, int, float]] = []
    for story in history.stories.values():
        counts = story.key == key and tenant in {None, story.tenant}
        for handout in story.handouts if counts else ():
            seen, issued = handout.first.at, handout.store_at - history.wall
            if issued <= since:
                continue
            moments.append((seen, 1, issued))
            moments.append((max(_until(history, story, handout), seen), -1, 0.0))
    running = 0
    for at, step, issued in sorted(moments):
        running += step
        if step > 0:
            yield at, issued, running


def _until(history: History, story: Story, handout: Handout) -> float:
    """Return the earliest time at which a delivery may have ended; before that it was certainly in flight."""
    ends = [handout.settled_at]
    ends += [later.first.at for later in story.handouts if later.order > handout.order]
    for since, by in handout.holders:
        ends += [max(begin, since) for begin, over in history.harm.get(by, ()) if over >= since]
        ends += [e.at for e in history.of(What.CLOSE) if e.by == by and e.at >= since]
    ends += [e.at for e in history.of(What.REVOKED) if e.receipt == handout.first.receipt]
    hung = [e.value for e in history.setting("max_processing").get(story.key, ()) if e.value]
    ends += [handout.store_at - history.wall + value for value in hung]
    return min(ends)


def _limited(history: History, name: str) -> Iterator[tuple[str, str | None, str]]:
    """Yield each queue, and each tenant of a queue, that may have this limit, with the name of its setting."""
    for key in history.setting(name):
        yield key, None, name
    name = f"tenant_{name}"
    for key in history.setting(name):
        for tenant in sorted({s.tenant for s in history.stories.values() if s.key == key}):
            yield key, tenant, name


def _whose(key: str, tenant: str | None) -> str:
    return key if tenant is None else f"{key} of {tenant or 'no tenant'}"


def in_force(
    history: History, name: str, only: str | None = None
) -> Iterator[tuple[str, float, float, float]]:
    """Yield each span in which a setting was certainly in force: key, begin, end and value."""
    for key, changes in history.setting(name).items():
        for change, following in zip_longest(changes, changes[1:]):
            if change.value is not None and only in {None, key}:
                yield key, change.at, following.at if following else _INF, change.value


def r11(history: History, _dump: Dump, _terms: Terms) -> Iterator[Violation]:
    """R11: in every window of w seconds there are at most burst + rate * w deliveries."""
    for key, tenant, name in _limited(history, "rate"):
        bursts = list(in_force(history, name.replace("rate", "burst"), key))
        for _, since, until, rate in in_force(history, name, key):
            burst = max(
                (size for _, begin, over, size in bursts if begin < until and over > since),
                default=0.0,
            )
            times = sorted(
                handout.store_at
                for story in history.stories.values()
                if story.key == key and tenant in {None, story.tenant}
                for handout in story.handouts
                if since + _ROUNDING < handout.store_at - history.wall < until
            )
            level, last = 0.0, times[0] if times else 0.0
            for at in times:
                level = max(0.0, level - rate * (at - last)) + 1.0
                last = at
                if level > burst + rate * _ROUNDING + 1e-6:
                    text = f"a burst of {level:.2f} at {at:.4f}, {burst:g} allowed"
                    yield Violation("R11", text, _whose(key, tenant))
                    break


def r12(history: History, _dump: Dump, _terms: Terms) -> Iterator[Violation]:
    """R12: after a pause was confirmed, no task is delivered or redelivered until the queue is resumed."""
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
    """R13: no task is delivered at or after its deadline."""
    for story in history.stories.values():
        limits = [one.called.deadline for one in story.publications if one.maybe]
        known = [limit for limit in limits if limit is not None]
        if not known or len(known) < len(limits):
            continue
        for handout in story.handouts:
            if handout.store_at >= max(known):
                late = handout.store_at - max(known)
                yield Violation("R13", f"delivered {late:.4f} s after its deadline", story.name)

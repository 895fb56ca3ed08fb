"""Rules for workflows and schedules: when steps run, how they end, and the tasks of instants."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import msgspec

from tests.chaos.history import Event, What
from tests.chaos.story import Dump, History, Story, Terms, Violation

_FAILED = frozenset({"cancelled", "discarded", "expired"})
_FIRED = frozenset({"accepted", "duplicate"})


class FlowFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of workflows and schedules."""

    steps: int = 0
    """number of confirmed steps"""
    releases: int = 0
    """number of steps that waited for others and were delivered"""
    instants: int = 0
    doubled: int = 0
    """number of steps and instants that were done more than once"""


def waits(history: History, dump: Dump, _terms: Terms) -> Iterator[Violation]:
    """Rule after: a step is not delivered before its condition is met, and it ends as its parents say."""
    by_name = {story.name: story for story in history.stories.values()}
    for story in history.stories.values():
        called = _step(story)
        if called is None or not called.after:
            continue
        parents = [by_name[name] for name in called.after if name in by_name]
        if len(parents) < len(called.after):
            yield Violation("after", "a parent was never published", story.name)
            continue
        for handout in story.handouts:
            at = handout.first.at
            done = [_acked(parent, at) for parent in parents]
            failed = [_failed(parent, dump, at) for parent in parents]
            met = {
                "done": all(done),
                "ended": all(one or two for one, two in zip(done, failed, strict=True)),
                "failed": any(failed),
            }
            if not met[called.when]:
                yield Violation("after", f"delivered before: {called.when}", story.name)
        yield from _fate(story, called, parents, dump)


def _fate(story: Story, called: Event, parents: list[Story], dump: Dump) -> Iterator[Violation]:
    known = dump.known(story.key, story.task)
    if known is None:
        return  # R1 reports it
    states = [found.state if (found := dump.known(p.key, p.task)) else "unknown" for p in parents]
    bad = any(state in _FAILED for state in states)
    buried = any(one.verb == "dead_letter" for p in parents for _, one in p.settlements)
    runs = {"done": not bad, "ended": True, "failed": bad}[called.when]
    if called.when == "failed" and buried and not bad:
        return  # it may have been released before its parent was redriven
    if runs and known.state == "cancelled":
        yield Violation("after", f"cancelled, and its parents are {states}", story.name)
    if not runs and known.state == "done":
        yield Violation("after", f"done, and its parents are {states}", story.name)


def _step(story: Story) -> Event | None:
    """Return the publish of a step; ``None`` for other tasks."""
    called = story.publications[0].called if story.publications else None
    return called if called is not None and called.origin == "step" else None


def _acked(story: Story, at: float) -> bool:
    return any(
        one.verb == "ack" and one.outcome != "lease_lost" and one.called.at <= at
        for _, one in story.settlements
    )


def _failed(story: Story, dump: Dump, at: float) -> bool:
    """Return whether a task was a dead letter before a time, or ended otherwise than done."""
    known = dump.known(story.key, story.task)
    return (known is not None and known.state in _FAILED) or any(
        one.called.at <= at and (one.verb == "dead_letter" or one.outcome == "dead")
        for _, one in story.settlements
    )


def instants(history: History, _dump: Dump, _terms: Terms) -> Iterator[Violation]:
    """Rule instants: the store has fired each instant of each schedule exactly once."""
    fired: defaultdict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in history.of(What.FIRED):
        fired[event.key, event.task].append(event)
    expected = {
        (story.key, story.task): story.name
        for story in history.stories.values()
        if story.publications and story.publications[0].called.origin == "schedule"
    }
    for name, text in expected.items():
        found = [event.outcome for event in fired.pop(name, []) for _ in range(event.count)]
        if len(found) != 1 or found[0] not in _FIRED:
            yield Violation("instants", f"fired {len(found)} times: {found}", text)
    for (key, task), events in fired.items():
        yield Violation("instants", f"not expected: {events[0].outcome}", f"{key}/{task}")


def figures(history: History) -> FlowFigures:
    """Compute the figures of workflows and schedules in a history."""
    steps = releases = number = doubled = 0
    for story in history.stories.values():
        if not story.publications or not (origin := story.publications[0].called.origin):
            continue
        number += origin == "schedule"
        steps += origin == "step" and story.stored
        releases += bool(story.publications[0].called.after and story.handouts)
        acked = {
            handout.first.receipt
            for handout, one in story.settlements
            if one.verb == "ack" and one.ok
        }
        doubled += len(acked) > 1
    return FlowFigures(steps=steps, releases=releases, instants=number, doubled=doubled)

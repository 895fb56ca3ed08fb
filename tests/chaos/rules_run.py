"""Rules for a run as a whole: R14 to R16, the budget of duplicates, and the logs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from tests.chaos.history import What
from tests.chaos.rules_time import in_force
from tests.chaos.story import LIVE, Dump, Handout, History, Story, Terms, Violation

_FREEZE_THAT_COUNTS = 0.5
"""fraction of a lease for which a consumer must be silent before its deliveries may be taken from it"""

_ROUNDING = 0.002
"""seconds of tolerance, because the store may round times to milliseconds"""


def r14(history: History, dump: Dump, terms: Terms) -> Iterator[Violation]:
    """R14: every task ends within the agreed time after the last fault."""
    for key, tasks in sorted(dump.tasks.items()):
        live = [(task, known) for task, known in tasks.items() if known and known.state in LIVE]
        for task, known in live:
            yield Violation("R14", f"still {known.state} at the end", f"{key}/{task}")
    phases = {event.name: event.at for event in history.of(What.PHASE)}
    if "heal" in phases:
        taken = phases.get("done", float("inf")) - phases["heal"]
        if taken > terms.liveness:
            yield Violation("R14", f"{taken:.1f} s from the last fault to the end of all tasks")


def r15(history: History, dump: Dump, _terms: Terms) -> Iterator[Violation]:
    """R15: the callback of an ended task is tried at least once, always with one id, and has one final state."""
    tried: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    ended: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for event in history.of(What.CALLBACK):
        tried[event.key, event.task].append(event.receipt)
    for event in history.of(What.CALLBACK_ENDED):
        ended[event.key, event.task].append(event.outcome)
    wanted = {
        (key, task)
        for key in history.setting("callback")
        for task, known in dump.tasks.get(key, {}).items()
        if known is not None and known.state not in LIVE
    }
    wanted |= {
        name
        for name, story in history.stories.items()
        if story.stored and any(one.called.target == "callback" for one in story.publications)
    }
    for key, task in sorted(wanted | tried.keys() | ended.keys()):
        name = f"{key}/{task}"
        ids = set(tried[key, task])
        if not ids:
            yield Violation("R15", "its callback was never tried", name)
        if len(ids) > 1:
            yield Violation("R15", f"its callback came under {len(ids)} ids", name)
        if len(ended[key, task]) != 1:
            yield Violation("R15", f"its callback has {len(ended[key, task])} final states", name)


def r16(history: History, dump: Dump, terms: Terms) -> Iterator[Violation]:
    """R16: a slot has at most one holder, and no slot is lost.

    The log records taking a slot when it is answered and freeing it when it is called, so each recorded span is
    certain.
    """
    holders: dict[str, tuple[str, str]] = {}
    for event in history.of(What.SLOT_TAKEN, What.SLOT_FREED, What.KILLED):
        if event.what is What.KILLED:
            holders = {slot: held for slot, held in holders.items() if held[1] != event.target}
        elif event.what is What.SLOT_FREED:
            if holders.get(event.name, ("", ""))[0] == event.receipt:
                del holders[event.name]
        else:
            token, by = holders.get(event.name, ("", ""))
            if token and token != event.receipt:
                yield Violation("R16", f"taken by {event.by} while {by} held it", event.name)
            holders[event.name] = event.receipt, event.by
    if terms.total_slots is not None and len(dump.slots) != terms.total_slots:
        yield Violation("R16", f"{len(dump.slots)} slots at the end, of {terms.total_slots}")


def duplicates(history: History) -> Iterator[tuple[Story, Handout, Handout]]:
    """Yield each delivery of an attempt that had been delivered already and was not returned."""
    for story in history.stories.values():
        for handout, later in pairwise(story.handouts):
            one, two = handout.first, later.first
            if (one.attempt, one.prior) != (two.attempt, two.prior):
                continue
            # A return counts even if its answer was ``lease_lost``: it may be the repetition of a call that took
            # effect.
            given_back = any(
                settlement.verb in {"redeliver", "lost"} and settlement.called.at <= two.at
                for settlement in handout.settlements
            )
            holders = {by for _, by in handout.holders}
            closed = any(
                event.by in holders and one.at <= event.at <= two.at
                for event in history.of(What.CLOSE)
            )
            if not given_back and not closed and not history.revived(story, one.at, two.at):
                yield story, handout, later


def budget(history: History, _dump: Dump, terms: Terms) -> Iterator[Violation]:
    """Rule budget: a task is delivered again only if its holder was killed, frozen or cut off long enough, or hung."""
    for story, handout, later in duplicates(history):
        silent = terms.lease * _FREEZE_THAT_COUNTS
        if _hung(history, story.key, handout, later):
            continue
        end = later.first.at
        if any(
            history.harmed(by, since, end, for_at_least=silent) for since, by in handout.holders
        ):
            continue
        settled = [handout.first.at, *(at for one in handout.settlements for at in one.times)]
        text = (
            f"handed to {later.first.by} {end - handout.first.at:.3f} s after {handout.first.by}, "
            f"which was alive (losses {later.first.losses})"
        )
        yield Violation("budget", text, story.name, terms.waives(*settled))


def _hung(history: History, key: str, handout: Handout, later: Handout) -> bool:
    """Return whether the delivery was held for the maximum processing time of the queue."""
    taken = later.store_at - handout.store_at
    return any(
        since <= later.first.at and taken >= value - _ROUNDING
        for _, since, _, value in in_force(history, "max_processing", key)
    )


def logs(history: History, _dump: Dump, _terms: Terms) -> Iterator[Violation]:
    """Rule log: no process recorded an unexpected error."""
    for event in history.of(What.ERROR):
        yield Violation("log", f"{event.by}: {event.note}")

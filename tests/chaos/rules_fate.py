"""Rules R0 to R6: the state and the end of each task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tests.chaos.history import Event, What
from tests.chaos.story import LIVE, STATES, Dump, History, Story, Terms, Violation

_ENDS = {"ack": "done", "dead_letter": "dead"}


def r0(history: History, _dump: Dump, terms: Terms) -> Iterator[Violation]:
    """R0: an id means one task, accepted once and with one payload; a receipt means one delivery."""
    for story in history.stories.values():
        accepted = [one for one in story.publications if one.outcome == "accepted"]
        if len(accepted) > 1:
            yield Violation("R0", f"accepted {len(accepted)} times", story.name)
        taken = {one.called.payload for one in story.publications if one.stored}
        if len(taken) > 1:
            yield Violation("R0", "one id was confirmed for different payloads", story.name)
    seen: dict[str, Event] = {}
    for event in history.of(What.DELIVERED):
        name = f"{event.key}/{event.task}"
        if before := seen.get(event.receipt):
            other = f"{before.key}/{before.task}"
            waived = other == name and _undone(before, event, history, terms)
            text = f"a receipt was issued twice, before for {other}"
            yield Violation("R0", text, name, waived)
        seen[event.receipt] = event


def _undone(first: Event, second: Event, history: History, terms: Terms) -> bool:
    """Return whether a failover between two deliveries may have undone the first one.

    The new master then issues the same receipt again. Times are those of the store, because processes that are slow
    record a delivery later.
    """
    issued, again = history.issued(first), history.issued(second)
    failed = [event.at for event in history.of(What.FAULT) if event.target.startswith("redis")]
    return any(
        start <= issued <= end and any(start <= at <= min(end, again) for at in failed)
        for start, end in terms.waived
    )


def r1(history: History, dump: Dump, terms: Terms) -> Iterator[Violation]:
    """R1: confirmed tasks exist, refused ones do not, no task comes from nowhere, and the ledger balances."""
    for story in history.stories.values():
        known = dump.known(story.key, story.task)
        if story.stored and known is None:
            answers = [one.answered.at for one in story.publications if one.answered and one.stored]
            waived = terms.may_lose_publishes and terms.waives(*answers)
            yield Violation(
                "R1", "lost: confirmed, and the store does not know it", story.name, waived
            )
        if not story.maybe and (known is not None or story.handouts):
            kind = "refused but present" if story.publications else "phantom: nobody published it"
            yield Violation("R1", kind, story.name)
        if known is None and story.handouts and not story.stored and story.maybe:
            answers = [handout.first.at for handout in story.handouts]
            waived = terms.may_lose_publishes and terms.waives(*answers)
            yield Violation(
                "R1", "lost: delivered, and the store does not know it", story.name, waived
            )
    for key in sorted(dump.ledgers):
        yield from _equation(key, history, dump, terms)


def _equation(key: str, history: History, dump: Dump, terms: Terms) -> Iterator[Violation]:
    ledger = dump.ledgers[key]
    published = ledger.get("published", 0)
    accounted = sum(ledger.get(state, 0) for state in STATES)
    if published != accounted:
        yield Violation("R1", f"published {published}, accounted for {accounted}", key)
    stories = [story for story in history.stories.values() if story.key == key]
    sure = sum(story.stored for story in stories)
    most = sum(story.maybe for story in stories)
    again = sum(event.what is What.RETRY for story in stories for event in story.operators)
    # Lost tasks were reported one by one above.
    lost = sum(story.stored and dump.known(key, story.task) is None for story in stories)
    if not sure - lost <= published <= most + again:
        yield Violation("R1", f"published {published}, but {sure} to {most + again} are known", key)
    if again:
        return
    states = Counter(known.state for known in dump.tasks.get(key, {}).values() if known)
    told = {state: ledger.get(state, 0) for state in STATES if ledger.get(state, 0)}
    if dict(states) != told and not terms.waived:
        yield Violation("R1", f"the ledger says {told}, its tasks {dict(states)}", key)


def r2(history: History, dump: Dump, _terms: Terms) -> Iterator[Violation]:
    """R2: a task is acknowledged only if it was delivered, and done only if it was acknowledged."""
    for story in history.stories.values():
        for one in story.stray:
            if one.ok:
                text = f"{one.verb} was accepted for a receipt that nobody was given"
                yield Violation("R2", text, story.name)
        known = dump.known(story.key, story.task)
        if known is not None and known.state == "done":
            acks = [
                one
                for _, one in story.settlements
                if one.verb == "ack" and one.outcome != "lease_lost"
            ]
            if not acks:
                yield Violation("R2", "done, and nobody acknowledged it", story.name)


def r3(history: History, _dump: Dump, terms: Terms) -> Iterator[Violation]:
    """R3: a task is not delivered after its end."""
    for story in history.stories.values():
        for handout, end in story.settlements:
            if not end.ends:
                continue
            for later in story.handouts:
                if later.order <= handout.order or later.first.at < end.called.at:
                    continue  # R5 covers deliveries made before the settlement was called
                if not history.revived(story, end.called.at, later.first.at):
                    text = f"delivered again after {end.verb} at {end.called.at:.4f}"
                    waived = terms.waives(*end.times)
                    yield Violation("R3", text, story.name, waived)
                    break


def r4(history: History, dump: Dump, terms: Terms) -> Iterator[Violation]:
    """R4: a task has exactly one end, which is the confirmed one; a receipt is settled once."""
    for story in history.stories.values():
        for handout in story.handouts:
            verbs = {one.verb for one in handout.settlements if one.ok}
            if len(verbs) > 1:
                text = f"one receipt was ended by {' and by '.join(sorted(verbs))}"
                yield Violation("R4", text, story.name)
        known = dump.known(story.key, story.task)
        ends = [(handout, one) for handout, one in story.settlements if one.ends]
        if known is None or not ends:
            continue
        handout, end = max(ends, key=lambda pair: pair[0].order)
        state = _ENDS.get(end.verb, "dead") if end.outcome != "dead" else "dead"
        if known.state != state and not _touched(history, story, end.called.at):
            waived = terms.waives(*end.times)
            text = f"ended as {state} by {end.verb}, and the store says {known.state}"
            yield Violation("R4", text, story.name, waived)
    yield from _letters(dump)


def _letters(dump: Dump) -> Iterator[Violation]:
    for key, letters in sorted(dump.dead_letters.items()):
        for task in letters:
            known = dump.known(key, task)
            if known is None or known.state != "dead":
                state = known.state if known else "unknown"
                yield Violation("R4", f"among the dead letters, and {state}", f"{key}/{task}")
        for task, known in dump.tasks.get(key, {}).items():
            if known is not None and known.state == "dead" and task not in letters:
                yield Violation("R4", "dead, and not among the dead letters", f"{key}/{task}")


def _touched(history: History, story: Story, since: float) -> bool:
    calls = history.of(What.DISCARD)
    return history.revived(story, since, float("inf")) or any(
        event.at >= since and event.key == story.key and event.task in {"", story.task}
        for event in calls
    )


def r5(history: History, _dump: Dump, terms: Terms) -> Iterator[Violation]:
    """R5: a receipt is not accepted after the task was delivered again or ended otherwise."""
    for story in history.stories.values():
        last = None
        for handout in story.handouts:
            if last is not None and handout.store_at < last.store_at:
                yield Violation("R5", "hand-outs are not in the order of their times", story.name)
            last = handout
        for handout, one in story.settlements:
            if not one.ok:
                continue
            # A repeated settlement may be told the result of its first call.
            first = min(o.called.at for o in handout.settlements if o.verb == one.verb)
            newer = [
                later
                for later in story.handouts
                if later.order > handout.order and later.first.at < first
            ]
            if newer:
                text = (
                    f"{one.verb} was accepted from {one.called.by} after {newer[0].first.by} had it"
                )
                yield Violation("R5", text, story.name, terms.waives(one.called.at))


def r6(history: History, dump: Dump, terms: Terms) -> Iterator[Violation]:
    """R6: only retries increase the attempt, and only losses increase the losses; both stay within their limits."""
    bounds = history.setting("max_losses")
    for story in history.stories.values():
        limits = [one.called.max_attempts for one in story.publications]
        limit = max((limit for limit in limits if limit is not None), default=None)
        retries = [one.called.at for _, one in story.settlements if one.verb == "retry"]
        retries += [event.at for event in story.operators if event.what is What.RETRY]
        attempt = losses = prior = 0
        since = 0.0
        for handout in story.handouts:
            event = handout.first
            if event.attempt < max(attempt, 1):
                text = f"attempt fell from {attempt} to {event.attempt}"
                yield Violation("R6", text, story.name, terms.waives(since, *retries))
            if event.attempt > 1 + sum(at <= event.at for at in retries):
                text = f"attempt {event.attempt} after {len(retries)} retries"
                yield Violation("R6", text, story.name)
            if limit is not None and event.attempt > limit:
                yield Violation("R6", f"attempt {event.attempt} of {limit}", story.name)
            same = (event.attempt, event.prior) == (attempt, prior)
            if same and event.losses < losses and not history.revived(story, since, event.at):
                text = f"losses fell from {losses} to {event.losses}"
                yield Violation("R6", text, story.name, terms.waives(since))
            most = max((e.value or 0 for e in bounds.get(story.key, ())), default=None)
            if most is not None and event.losses > most:
                yield Violation("R6", f"delivered after {event.losses} losses", story.name)
            attempt, losses, prior, since = event.attempt, event.losses, event.prior, event.at
        known = dump.known(story.key, story.task)
        if known is not None and known.attempt < attempt:
            text = f"delivered as attempt {attempt}, and the store says {known.attempt}"
            yield Violation("R6", text, story.name, terms.waives(since, *retries))
        if known is not None and known.state in LIVE and known.attempt > 1 + len(retries):
            text = f"the store says attempt {known.attempt}, after {len(retries)} retries"
            yield Violation("R6", text, story.name)

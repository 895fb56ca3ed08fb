"""Falsifies valid histories in one point each, and names the rules that must detect it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from tests.chaos.history import Event, What
from tests.chaos.story import Dump, Known


class Mutant(NamedTuple):
    """A history and a final state, one of which has been falsified."""

    events: list[Event]
    dump: Dump


class _Inapplicable(Exception):
    pass


Change = Callable[[random.Random, list[Event], Dump], Mutant]


class Mutation(NamedTuple):
    """One way to falsify a history, and the rules of which at least one must detect it."""

    name: str
    rules: frozenset[str]
    change: Change

    def mutate(self, seed: int, events: list[Event], dump: Dump) -> Mutant | None:
        """Return a falsified history; None if this history has no event that can be falsified in this way."""
        try:
            return self.change(random.Random(seed), events, dump)
        except _Inapplicable:
            return None


MUTATIONS: list[Mutation] = []


def _lie(*rules: str) -> Callable[[Change], Change]:
    def add(change: Change) -> Change:
        MUTATIONS.append(Mutation(change.__name__, frozenset(rules), change))
        return change

    return add


def _one(chance: random.Random, events: list[Event], what: What, **fields: object) -> Event:
    found = [
        e
        for e in events
        if e.what is what and all(getattr(e, name) == value for name, value in fields.items())
    ]
    if not found:
        raise _Inapplicable
    return chance.choice(found)


def _changed(events: list[Event], event: Event, **fields: object) -> list[Event]:
    return [msgspec.structs.replace(e, **fields) if e is event else e for e in events]


def _set(dump: Dump, key: str, task: str, known: Known | None) -> Dump:
    tasks = {**dump.tasks, key: {**dump.tasks[key], task: known}}
    return msgspec.structs.replace(dump, tasks=tasks)


@_lie("R1")
def lose_a_task(chance: random.Random, events: list[Event], dump: Dump) -> Mutant:
    """The store forgets a task that it has confirmed."""
    event = _one(chance, events, What.PUBLISHED, outcome="accepted")
    return Mutant(events, _set(dump, event.key, event.task, None))


@_lie("R1")
def miscount(chance: random.Random, events: list[Event], dump: Dump) -> Mutant:
    """One counter of a ledger is off by one."""
    ((key, ledger),) = dump.ledgers.items()
    name = chance.choice(sorted(ledger))
    ledgers = {key: {**ledger, name: ledger[name] + chance.choice([-1, 1])}}
    return Mutant(events, msgspec.structs.replace(dump, ledgers=ledgers))


@_lie("R1")
def keep_a_refused_one(chance: random.Random, events: list[Event], dump: Dump) -> Mutant:
    """The store keeps a task that it refused."""
    event = _one(chance, events, What.PUBLISHED, outcome="refused")
    return Mutant(events, _set(dump, event.key, event.task, Known("done")))


@_lie("R1")
def invent_a_delivery(chance: random.Random, events: list[Event], dump: Dump) -> Mutant:
    """A task is delivered that was never published."""
    event = _one(chance, events, What.DELIVERED)
    return Mutant(_changed(events, event, task="ghost"), dump)


@_lie("R0")
def accept_twice(chance: random.Random, events: list[Event], dump: Dump) -> Mutant:
    """A task is accepted a second time instead of being reported as a duplicate."""
    event = _one(chance, events, What.PUBLISHED, outcome="accepted")
    call = next(
        e for e in events if e.what is What.PUBLISH and (e.task, e.call) == (event.task, event.call)
    )
    again = [msgspec.structs.replace(e, at=e.at + 500, call=9999) for e in (call, event)]
    return Mutant([*events, *again], dump)


@_lie("R0")
def reuse_a_receipt(chance: random.Random, events: list[Event], dump: Dump) -> Mutant:
    """The same receipt is issued for two deliveries."""
    event = _one(chance, events, What.DELIVERED)
    other = _one(chance, events, What.DELIVERED)
    if event is other:
        raise _Inapplicable
    return Mutant(_changed(events, event, receipt=other.receipt), dump)


@_lie("R2")
def forget_the_acks(chance: random.Random, events: list[Event], dump: Dump) -> Mutant:
    """A task is done although no ack was sent."""
    event = _one(chance, events, What.SETTLED, verb="ack", outcome="ok")
    whats = {What.SETTLE, What.SETTLED}
    rest = [e for e in events if e.what not in whats or e.task != event.task]
    return Mutant(rest, dump)


@_lie("R2")
def ack_out_of_the_blue(chance: random.Random, events: list[Event], dump: Dump) -> Mutant:
    """The store accepts a receipt that it never issued."""
    event = _one(chance, events, What.SETTLED, outcome="ok")
    pair = [e for e in events if (e.by, e.call) == (event.by, event.call)]
    for one in pair:
        events = _changed(events, one, receipt="forged")
    return Mutant(events, dump)


@_lie("R3")
def deliver_again(chance: random.Random, events: list[Event], dump: Dump) -> Mutant:
    """A task is delivered again after its end."""
    event = _one(chance, events, What.SETTLED, verb="ack", outcome="ok")
    before = next(e for e in events if e.what is What.DELIVERED and e.receipt == event.receipt)
    later = event.at - before.at + 0.0005
    again = msgspec.structs.replace(
        before, at=before.at + later, store_at=(before.store_at or 0) + later, receipt="again"
    )
    return Mutant([*events, again], dump)


@_lie("R4")
def end_otherwise(chance: random.Random, events: list[Event], dump: Dump) -> Mutant:
    """The store remembers another final state than the one it confirmed."""
    event = _one(chance, events, What.SETTLED, verb="ack", outcome="ok")
    return Mutant(events, _set(dump, event.key, event.task, Known("expired", 99)))


@_lie("R4", "R2", "R5")
def end_twice(chance: random.Random, events: list[Event], dump: Dump) -> Mutant:
    """The store accepts two different settlements for one receipt."""
    event = _one(chance, events, What.SETTLED, verb="ack", outcome="ok")
    fields = {"call": 9999, "verb": "dead_letter"}
    call = msgspec.structs.replace(event, what=What.SETTLE, outcome="", at=event.at + 0.1, **fields)
    answer = msgspec.structs.replace(event, at=event.at + 0.2, **fields)
    return Mutant([*events, call, answer], dump)


@_lie("R5", "R3")
def accept_a_stale_one(chance: random.Random, events: list[Event], dump: Dump) -> Mutant:
    """A settlement that was refused as stale counts as accepted."""
    event = _one(chance, events, What.SETTLED, verb="ack", outcome="lease_lost")
    return Mutant(_changed(events, event, outcome="ok"), dump)


@_lie("R6")
def burn_an_attempt(chance: random.Random, events: list[Event], dump: Dump) -> Mutant:
    """The attempt number grows although no retry was requested."""
    event = _one(chance, events, What.DELIVERED)
    return Mutant(_changed(events, event, attempt=event.attempt + 1), dump)


@_lie("R6", "budget")
def forget_a_loss(chance: random.Random, events: list[Event], dump: Dump) -> Mutant:
    """The number of losses decreases within an attempt."""
    event = _one(chance, events, What.DELIVERED, losses=1)
    before = [
        e for e in events if e.what is What.DELIVERED and e.task == event.task and e.at < event.at
    ]
    if not before:
        raise _Inapplicable
    return Mutant(_changed(events, before[-1], losses=7), dump)


@_lie("R7", "R8")
def overtake(chance: random.Random, events: list[Event], dump: Dump) -> Mutant:
    """Two tasks of one batch are delivered in the wrong order."""
    event = _one(chance, events, What.PUBLISHED, outcome="accepted")
    batch = [
        e.task
        for e in events
        if e.what is What.PUBLISH and (e.by, e.call) == (event.by, event.call)
    ]
    calm = [
        task
        for task in batch
        if sum(e.what is What.PUBLISH and e.task == task for e in events) == 1
        and not any(e.not_before for e in events if e.task == task)
        and not any(e.losses for e in events if e.task == task)
    ]
    firsts = [
        next(e for e in events if e.what is What.DELIVERED and e.task == task) for task in calm
    ]
    blind = [e.at for e in events if e.what in {What.KILLED, What.FROZEN, What.THAWED}]
    if len(firsts) < 2 or any(event.at < at < firsts[-1].at for at in blind):
        raise _Inapplicable
    one, two = firsts[0], firsts[1]
    if one.store_at == two.store_at and one.by == two.by:
        events = _changed(events, one, at=two.at, store_at=two.store_at)
        return Mutant(_changed(events, two, at=one.at, store_at=one.store_at), dump)
    events = _changed(events, one, store_at=two.store_at)
    return Mutant(_changed(events, two, store_at=one.store_at), dump)


@_lie("R9")
def come_early(chance: random.Random, events: list[Event], dump: Dump) -> Mutant:
    """A scheduled task is delivered before it is due."""
    event = _one(chance, events, What.SETTLE, verb="retry")
    answer = next(
        e for e in events if e.what is What.SETTLED and (e.by, e.call) == (event.by, event.call)
    )
    if answer.outcome == "lease_lost":
        raise _Inapplicable
    after = [
        e for e in events if e.what is What.DELIVERED and e.task == event.task and e.at > event.at
    ]
    if not after:
        raise _Inapplicable
    return Mutant(_changed(events, event, due=(after[0].store_at or 0) + 0.5), dump)


def _batch(chance: random.Random, events: list[Event], least: int) -> Event:
    """Return a receive that had at least ``least`` deliveries."""
    sizes = [e.count for e in events if e.what is What.RECEIVED and e.count >= least]
    return _one(chance, events, What.RECEIVED, count=chance.choice(sizes or [-1]))


@_lie("R10")
def exceed_the_limit_in_flight(chance: random.Random, events: list[Event], dump: Dump) -> Mutant:
    """More tasks are delivered at once than the in-flight limit allows."""
    size = _batch(chance, events, 2).count
    limit = _one(chance, events, What.SETTINGS, name="limit")
    return Mutant(_changed(events, limit, value=size - 1.0), dump)


@_lie("R11")
def exceed_the_rate(chance: random.Random, events: list[Event], dump: Dump) -> Mutant:
    """More tasks are delivered at once than the token bucket holds."""
    size = _batch(chance, events, 2).count
    burst = _one(chance, events, What.SETTINGS, name="burst")
    return Mutant(_changed(events, burst, value=size - 1.0), dump)


@_lie("R12")
def ignore_a_pause(chance: random.Random, events: list[Event], dump: Dump) -> Mutant:
    """A task is delivered or redelivered after a pause was confirmed."""
    event = _one(chance, events, What.DELIVERED)
    at, store_at = event.at - 0.01, (event.store_at or 0) - 0.01
    resumed = [e.at for e in events if e.what is What.RESUME and e.key == event.key]
    if any(at < over <= event.at + 0.01 for over in resumed):
        raise _Inapplicable  # resumed by then, so still a valid history
    paused = Event(at=at, by="op", what=What.PAUSED, key=event.key, store_at=store_at)
    return Mutant([*events, paused], dump)


@_lie("R13")
def come_late(chance: random.Random, events: list[Event], dump: Dump) -> Mutant:
    """A task is delivered after its deadline."""
    event = _one(chance, events, What.DELIVERED)
    for call in [e for e in events if e.what is What.PUBLISH and e.task == event.task]:
        events = _changed(events, call, deadline=event.store_at)
    return Mutant(events, dump)


@_lie("R14")
def leave_one_alive(chance: random.Random, events: list[Event], dump: Dump) -> Mutant:
    """A task is still waiting at the end of the run."""
    event = _one(chance, events, What.PUBLISHED, outcome="accepted")
    return Mutant(events, _set(dump, event.key, event.task, Known("waiting", 99)))


@_lie("budget")
def spare_the_holder(chance: random.Random, events: list[Event], dump: Dump) -> Mutant:
    """A task was redelivered although its holder was alive."""
    event = _one(chance, events, What.DELIVERED, losses=1)
    whats = {What.KILLED, What.FROZEN, What.THAWED}
    rest = [e for e in events if e.what not in whats]
    before = [
        e
        for e in events
        if e.what is What.DELIVERED and (e.task, e.attempt) == (event.task, event.attempt)
    ]
    returned = any(
        e.what is What.SETTLE and e.task == event.task and e.verb == "redeliver" for e in events
    )
    if not before or before[0] is event or returned:
        raise _Inapplicable
    return Mutant(rest, dump)

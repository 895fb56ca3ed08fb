"""Keys that identify the states of the small model, so that equivalent states are visited once.

States are equivalent if they differ only in worker names, or in numbers that have the same order.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from tests.model.books import LIVE, Record
from tests.model.players import Held

if TYPE_CHECKING:
    from tests.model.small import Small

_ABSENT = Record(state="")


def key_of(world: Small) -> Hashable:
    """Return a hashable key of a state, without anything that cannot influence later steps."""
    held = {(one.name, one.receipt.fence) for worker in world.workers for one in worker.held}
    numbers = {key: {0} for key in world.keys}
    times = {0, world.books.now}
    tasks = world.books.tasks
    for name, r in tasks.items():
        if r.state in LIVE:
            numbers[name[0]].update((r.seq, r.fence, -world.fates[name].since))
            times.update((r.due, r.deadline))
    rank = {
        key: {number: n for n, number in enumerate(sorted(some))} for key, some in numbers.items()
    }
    moment = {time: n for n, time in enumerate(sorted(times))}
    about = []
    for w in world.workers:
        in_hand = sorted(filter(None, (_in_hand(world, h) for h in w.held)))
        turn = w.turn if world.late else 0
        about.append((w.alive, w.starts, w.doubt, turn, tuple(in_hand), w.name))
    about.sort()
    alias = {one[-1]: n for n, one in enumerate(about)}

    def whose(token: str) -> tuple[int, str]:
        return (alias[token[:2]], token[3:]) if token else (-1, "")

    told: list[object] = []
    for name, fate in world.fates.items():
        r = tasks.get(name, _ABSENT)
        knows = (name, r.settled) in held
        numbered = rank[name[0]]
        told.append((r.state, fate.confirmed, fate.waived, fate.told != r.state and fate.told))
        told.append((r.verb, r.told) if knows else "")
        if r.state in LIVE:
            told.append((
                r.place, r.attempt, r.losses, r.prior, r.handed, numbered[r.seq], numbered[r.fence],
                whose(r.owner), moment[r.due], moment[r.deadline], numbered[-fate.since],
            ))  # fmt: skip
        elif r.state == "dead":
            told.append((r.attempt, r.losses, r.prior))
    turns = [
        (whose(token), one.turn if world.late else 0)
        for token, one in world.books.consumers.items()
    ]
    late = [(whose(token), turn) for token, turn in world.late]
    return (
        moment[world.books.now], tuple(one[:-1] for one in about), tuple(told), tuple(sorted(turns)),
        tuple(sorted(late)), world.crashes, world.lost, world.failovers, world.faults,
    )  # fmt: skip


def _in_hand(world: Small, held: Held) -> tuple[object, ...] | None:
    """Return the part of a worker's delivery that matters; None if its receipt is stale, because that cannot change."""
    r = world.books.tasks.get(held.name, _ABSENT)
    fence = held.receipt.fence
    if fence not in {r.fence, r.settled}:
        return None
    return held.name, held.receipt.token[3:], held.attempt, held.verb, r.fence == fence

"""The nemesis: which fault hits whom, when and for how long, all of it decided by a seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec


class Fault(msgspec.Struct, frozen=True):
    """One fault. The same values have the same effect in every replay."""

    kind: str
    """what: kill, freeze, pause, forget, fill, idle, cut, block, deafen, lose, slow, slice, squeeze, swap"""
    target: str
    """whom: redis, consumer, producer, server, worker, link-… of one of these, or a queue"""
    number: int
    """which of them, where there are several"""
    start: float
    """seconds after the faults begin"""
    length: float
    """seconds; 0 for a blow"""

    @property
    def name(self) -> str:
        """Kind and target: what faults are counted by."""
        return f"{self.kind} {self.target}"

    def __str__(self) -> str:
        """Say it in one line."""
        lasting = f" for {self.length:.3f} s" if self.length else ""
        return f"{self.start:6.3f} s  {self.kind} {self.target} {self.number}{lasting}"


class Offer(NamedTuple):
    """A kind of fault that a menu has: how often, and how long it may last."""

    kind: str
    target: str
    weight: int = 1
    shortest: float = 0.0
    longest: float = 0.0


_REDIS = (
    Offer("kill", "redis", 3, 0.05, 0.6),  # SIGKILL; started again after so long
    Offer("freeze", "redis", 2, 0.1, 1.0),  # SIGSTOP
    Offer("pause", "redis", 2, 0.1, 0.8),  # CLIENT PAUSE, of writes
    Offer("forget", "redis", 2),  # SCRIPT FLUSH
    Offer("fill", "redis", 2, 0.2, 0.8),  # maxmemory below what is used
    Offer("idle", "redis", 1, 0.5, 1.0),  # the server closes what is idle for 1 s
)
_PROCESSES = (
    Offer("kill", "consumer", 4),  # SIGKILL; another one is started
    Offer("freeze", "consumer", 2, 0.1, 2.5),  # SIGSTOP
    Offer("kill", "producer", 2),
    Offer("freeze", "producer", 1, 0.1, 0.8),
)
_LINKS = tuple(
    offer
    for who in ("consumer", "producer")
    for offer in (
        Offer("cut", f"link-{who}", 2),  # RST on every connection
        Offer("lose", f"link-{who}", 3),  # one request is carried out, its reply lost
        Offer("block", f"link-{who}", 1, 0.1, 1.0),  # nothing passes, sockets open
        Offer("deafen", f"link-{who}", 1, 0.1, 1.0),  # requests pass, replies do not
        Offer("slow", f"link-{who}", 1, 0.2, 1.0),  # 20 ms more on each round trip
        Offer("slice", f"link-{who}", 1, 0.1, 0.5),  # a few bytes per segment
    )
)
_SERVERS = (
    Offer("kill", "server", 3, 0.1, 0.5),
    Offer("stop", "server", 2, 0.1, 0.5),  # SIGTERM
    Offer("freeze", "server", 1, 0.1, 1.0),
    Offer("kill", "worker", 4),
    Offer("freeze", "worker", 1, 0.1, 2.5),
    Offer("cut", "link-worker", 3),
    Offer("kill", "redis", 2, 0.05, 0.6),
    Offer("pause", "redis", 1, 0.1, 0.8),
    Offer("forget", "redis", 1),
    Offer("lose", "link-server", 2),
    Offer("cut", "link-server", 1),
)
_QUEUES = (
    Offer("pause", "queue", 6, 0.1, 1.0),  # an operator pauses it, and lets it go on
    Offer("squeeze", "queue", 4, 0.1, 1.0),  # its limits are lowered, and set as before
)
_ORDER = (
    # fair order in place of fifo, or the other way, for a while
    Offer("swap", "queue", 6, 0.1, 1.5),
    *_QUEUES,
)

MENUS: Mapping[str, tuple[Offer, ...]] = {
    "redis": _REDIS,
    "processes": _PROCESSES,
    "links": _LINKS,
    "mixed": (*_REDIS, *_PROCESSES, *_LINKS),
    "servers": _SERVERS,
    "limits": (*_REDIS, *_PROCESSES, *_LINKS, *_QUEUES),
    "order": (*_REDIS, *_PROCESSES, *_LINKS, *_ORDER),
}


def schedule(
    seed: int, menu: str, *, seconds: float, count: int, numbers: Mapping[str, int]
) -> tuple[Fault, ...]:
    """Return ``count`` faults from a menu within ``seconds``; the same arguments, the same faults.

    ``numbers`` says how many there are of each target. A target is hit again only when its last
    fault is over, so that every fault has its effect; what finds no time for that is left out.
    """
    chance = random.Random(f"{seed} {menu}")
    offers = MENUS[menu]
    weights = [offer.weight for offer in offers]
    free: dict[tuple[str, int], float] = {}
    faults: list[Fault] = []
    for start in sorted(chance.uniform(0, seconds) for _ in range(count)):
        (offer,) = chance.choices(offers, weights)
        number = chance.randrange(numbers.get(offer.target.removeprefix("link-"), 1))
        length = round(chance.uniform(offer.shortest, offer.longest), 3)
        whom = offer.target, number
        start = round(max(start, free.get(whom, 0.0)), 3)  # noqa: PLW2901 - put off
        if start <= seconds:
            free[whom] = start + length + 0.05
            faults.append(Fault(offer.kind, offer.target, number, start, length))
    return tuple(sorted(faults, key=lambda fault: fault.start))


def describe(seed: int, menu: str, faults: Iterable[Fault]) -> str:
    """Return a schedule as text: what is printed when a run fails."""
    return "\n".join([f"seed {seed}, menu {menu!r}:", *(f"  {fault}" for fault in faults)])


def read_faults(table: Sequence[Mapping[str, Any]]) -> tuple[Fault, ...]:
    """Return the faults of a list of tables, as the list of regressions keeps them."""
    return tuple(msgspec.convert(row, Fault) for row in table)


async def unleash(faults: Iterable[Fault], inflict: Callable[[Fault], Awaitable[None]]) -> None:
    """Inflict each fault at its time, side by side; return when the last one is over."""
    loop = asyncio.get_running_loop()
    begin = loop.time()

    async def one(fault: Fault) -> None:
        await asyncio.sleep(begin + fault.start - loop.time())
        await inflict(fault)

    async with asyncio.TaskGroup() as group:
        for fault in faults:
            group.create_task(one(fault))

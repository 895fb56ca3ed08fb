"""Schedules of faults: a seed decides which fault hits which target, when, and for how long."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec


class Fault(msgspec.Struct, frozen=True):
    """One fault of a schedule. Equal values mean the same fault in every replay."""

    kind: str
    """kill, stop, freeze, pause, forget, fill, idle, deny, lock, unreplicate, demote, rotate, skew, cut, block,
    deafen, lose, slow, slice, squeeze, swap, damage, redrive, discard, reshard, start, rollback, or what a GPU server
    does wrong"""
    target: str
    """redis, consumer, producer, server, worker, child (of a worker), dispatcher, gpu, planner, ``link-`` and one of
    these names, queue, or migration"""
    number: int
    """number of the target, if there are several"""
    start: float
    """seconds after the start of the faults phase"""
    length: float
    """duration in seconds; 0 if the fault is momentary"""
    point: str = ""
    """point in the code of a process, see `tests.chaos.points`: the fault happens when one comes there after `start`"""

    @property
    def name(self) -> str:
        """Kind and target, under which faults are counted."""
        at = f" {self.point}" if self.point else ""
        return f"{self.kind} {self.target}{at}"

    def __str__(self) -> str:
        """Return the fault as one line of text."""
        lasting = f" for {self.length:.3f} s" if self.length else ""
        at = f" at {self.point}" if self.point else ""
        return f"{self.start:6.3f} s  {self.kind} {self.target} {self.number}{lasting}{at}"


class Offer(NamedTuple):
    """A kind of fault in a menu, with its relative frequency and the limits of its duration."""

    kind: str
    target: str
    weight: int = 1
    shortest: float = 0.0
    longest: float = 0.0
    points: tuple[str, ...] = ()
    """points of which the seed chooses one"""


_REDIS = (
    Offer("kill", "redis", 3, 0.05, 0.6),  # SIGKILL, then a restart after the fault's length
    Offer("freeze", "redis", 2, 0.1, 1.0),  # SIGSTOP
    Offer("pause", "redis", 2, 0.1, 0.8),  # CLIENT PAUSE, for writes
    Offer("forget", "redis", 2),  # SCRIPT FLUSH
    Offer("fill", "redis", 2, 0.2, 0.8),  # maxmemory is set below the memory in use
    Offer("idle", "redis", 1, 0.5, 1.0),  # Redis closes connections that are idle for 1 s
)
_PROCESSES = (
    Offer("kill", "consumer", 4),  # SIGKILL; a new process is started
    Offer("freeze", "consumer", 2, 0.1, 2.5),  # SIGSTOP
    Offer("kill", "producer", 2),
    Offer("freeze", "producer", 1, 0.1, 0.8),
)
_LINKS = tuple(
    offer
    for who in ("consumer", "producer")
    for offer in (
        Offer("cut", f"link-{who}", 2),  # reset every connection
        Offer("lose", f"link-{who}", 3),  # one request is carried out, but its reply is lost
        Offer("block", f"link-{who}", 1, 0.1, 1.0),  # no data passes, but sockets stay open
        Offer("deafen", f"link-{who}", 1, 0.1, 1.0),  # requests pass, replies do not
        Offer("slow", f"link-{who}", 1, 0.2, 1.0),  # 20 ms are added to each round trip
        Offer("slice", f"link-{who}", 1, 0.1, 0.5),  # data passes in segments of a few bytes
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
    Offer("pause", "queue", 6, 0.1, 1.0),  # an operator pauses the queue and resumes it later
    Offer("squeeze", "queue", 4, 0.1, 1.0),  # the queue's limits are lowered, then reset
)
_ORDER = (
    # The queue's order is switched between fair and FIFO, and back.
    Offer("swap", "queue", 6, 0.1, 1.5),
    *_QUEUES,
)

_SECRETS = (
    Offer("deny", "redis", 4, 0.1, 1.5),  # the user of the processes lacks a right
    Offer("lock", "redis", 4, 0.1, 1.5),  # the password is another one, and connections are closed
    Offer("cut", "link-consumer", 4),
    Offer("cut", "link-producer", 4),
    Offer("lose", "link-consumer", 4),
)
_EDGES = (
    Offer("unreplicate", "redis", 2, 0.2, 0.8),  # min-replicas-to-write is 1, without a replica
    Offer(
        "demote", "redis", 2, 0.2, 0.8
    ),  # Redis becomes a read-only replica of a master that does not answer
    Offer(
        "rotate", "redis", 2, 0.1, 0.8
    ),  # a new password; its file follows after the fault's length
    Offer(
        "skew", "redis", 3, 0.2, 1.0
    ),  # the clock of Redis is set back by an hour, and forward again
    Offer("kill", "redis", 2, 0.05, 0.6),
    Offer("damage", "queue", 4),  # the record of a waiting task loses its end
    Offer("cut", "link-consumer", 2),
    Offer("cut", "link-producer", 1),
    Offer("lose", "link-consumer", 2),
)

_DISPATCH = (
    Offer("kill", "dispatcher", 4, 0.0, 0.5),
    Offer("stop", "dispatcher", 3, 0.0, 0.5),
    Offer("freeze", "dispatcher", 2, 0.1, 2.5),
    Offer("cut", "link-dispatcher", 2),
    Offer("lose", "link-dispatcher", 2),
    Offer("block", "link-dispatcher", 1, 0.1, 1.0),
    Offer("kill", "redis", 2, 0.05, 0.6),
    Offer("freeze", "redis", 1, 0.1, 1.0),
    Offer("pause", "redis", 1, 0.1, 0.8),
    Offer("forget", "redis", 1),
    Offer("kill", "gpu", 4, 0.05, 0.5),
    Offer("freeze", "gpu", 1, 0.1, 0.8),
    # What a GPU server does wrong for a while: see `tests.chaos.programs.gpu`.
    *(
        Offer(kind, "gpu", 1, 0.2, 0.8)
        for kind in (
            "busy",
            "error",
            "gateway",
            "drop",
            "late",
            "hang",
            "garble",
            "foreign",
            "stale",
        )
    ),
)

# A server is killed at any time, and started again.
_SERVER = Offer("kill", "server", 2, 0.1, 0.5)
_CARRIED = (
    *("before register", "after register", "before release", "after release"),
    *("before confirm", "after confirm"),
)
_FIRED = ("before fire", "after fire")
_ADDED = ("before add", "after add")
_OPERATORS = (Offer("redrive", "queue", 3), Offer("discard", "queue", 3))

WORKFLOWS: Mapping[str, tuple[Offer, ...]] = {
    # A publisher or a server dies between the parts of a workflow, its manifest and its steps.
    "manifest": (
        Offer("kill", "planner", 3, 0.1, 0.3, ("after parts", "before manifest", "after manifest")),
        Offer("kill", "server", 3, 0.1, 0.3, ("before steps", "after steps", "after manifest")),
        Offer("kill", "planner", 1, 0.1, 0.3),
    ),
    # A worker dies around the call that stores the steps which a handler has added.
    "adding": (
        Offer("kill", "worker", 5, 0.1, 0.5, _ADDED),
        Offer("kill", "worker", 1, 0.1, 0.5),
        Offer("kill", "server", 1, 0.1, 0.5, ("before steps", "after steps")),
    ),
    # The same with handlers in child processes, which die as well, alone or with their worker.
    "process": (
        Offer("kill", "child", 4, points=("in handler", *_ADDED)),
        Offer("kill", "worker", 3, 0.1, 0.5, _ADDED),
        Offer("kill", "worker", 1, 0.1, 0.5),
    ),
    # A server dies between the end of a parent and the release of its children.
    "release": (Offer("kill", "server", 4, 0.1, 0.5, _CARRIED), Offer("kill", "worker", 1)),
    # The store dies between the writing of a line and its delivery.
    "outbox": (Offer("kill", "redis", 4, 0.05, 0.3, _CARRIED), Offer("lose", "link-server", 1)),
    # Three servers fire the same schedules, and some of them die.
    "schedules": (Offer("kill", "server", 4, 0.1, 0.5, _FIRED), Offer("lose", "link-server", 2)),
    # The clock of a server is an hour off.
    "clock": (Offer("kill", "server", 2, 0.1, 0.5, _FIRED), _SERVER),
    # The clock of the store passes a change of the clock of a time zone, perhaps while the store or servers are down.
    "zones": (
        Offer("kill", "server", 3, 0.1, 0.5, _FIRED),
        Offer("kill", "redis", 2, 0.3, 1.0),
        _SERVER,
    ),
    # The queue of the schedules is full at most of their instants.
    "full": (Offer("pause", "queue", 4, 0.5, 1.5), _SERVER),
    # Operators redrive and discard dead letters that hold others.
    "held": (*_OPERATORS, Offer("kill", "server", 1, 0.1, 0.5, _CARRIED), _SERVER),
    # The number of shards changes while tasks are blocked.
    "shards": (
        Offer("reshard", "queue", 4),
        Offer("kill", "server", 1, 0.1, 0.5, _CARRIED),
        _SERVER,
    ),
    # The store is replaced by another one while tasks are blocked.
    "migration": (
        Offer("start", "migration", 3),
        Offer("rollback", "migration", 1),
        Offer("kill", "server", 1, 0.1, 0.5, _CARRIED),
        _SERVER,
    ),
}
"""faults for runs of workflows and schedules"""
MENUS: Mapping[str, tuple[Offer, ...]] = {
    "redis": _REDIS,
    "processes": _PROCESSES,
    "links": _LINKS,
    "mixed": (*_REDIS, *_PROCESSES, *_LINKS),
    "servers": _SERVERS,
    "secrets": _SECRETS,
    "limits": (*_REDIS, *_PROCESSES, *_LINKS, *_QUEUES),
    "order": (*_REDIS, *_PROCESSES, *_LINKS, *_ORDER),
    "edges": _EDGES,
    "dispatch": _DISPATCH,
}


def schedule(
    seed: int, menu: str, *, seconds: float, count: int, numbers: Mapping[str, int]
) -> tuple[Fault, ...]:
    """Return up to ``count`` faults of a menu within ``seconds``; equal arguments give equal schedules.

    ``numbers`` is the number of instances of each target. A target is hit again only after its last fault has ended, so
    that each fault takes effect. Faults that do not fit into the time are left out.
    """
    chance = random.Random(f"{seed} {menu}")
    offers = WORKFLOWS[menu] if menu in WORKFLOWS else MENUS[menu]
    weights = [offer.weight for offer in offers]
    free: dict[tuple[str, int], float] = {}
    faults: list[Fault] = []
    for start in sorted(chance.uniform(0, seconds) for _ in range(count)):
        (offer,) = chance.choices(offers, weights)
        number = chance.randrange(numbers.get(offer.target.removeprefix("link-"), 1))
        length = round(chance.uniform(offer.shortest, offer.longest), 3)
        whom = offer.target, number
        start = round(max(start, free.get(whom, 0.0)), 3)  # noqa: PLW2901 - delayed until the target is free
        if start <= seconds:
            free[whom] = start + length + 0.05
            point = chance.choice(offer.points) if offer.points else ""
            faults.append(Fault(offer.kind, offer.target, number, start, length, point))
    return tuple(sorted(faults, key=lambda fault: fault.start))


def describe(seed: int, menu: str, faults: Iterable[Fault]) -> str:
    """Return a schedule as text, which is printed if a run fails."""
    return "\n".join([f"seed {seed}, menu {menu!r}:", *(f"  {fault}" for fault in faults)])


def read_faults(table: Sequence[Mapping[str, Any]]) -> tuple[Fault, ...]:
    """Convert tables of the regressions file to faults."""
    return tuple(msgspec.convert(row, Fault) for row in table)


async def unleash(faults: Iterable[Fault], inflict: Callable[[Fault], Awaitable[None]]) -> None:
    """Carry out all faults concurrently, each at its time; return when the last one is over."""
    loop = asyncio.get_running_loop()
    begin = loop.time()

    async def one(fault: Fault) -> None:
        await asyncio.sleep(begin + fault.start - loop.time())
        await inflict(fault)

    async with asyncio.TaskGroup() as group:
        for fault in faults:
            group.create_task(one(fault))

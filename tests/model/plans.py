"""The bounds of the model's explorations: small ones in every test run, all faults at once on demand."""

from __future__ import annotations

from tests.model.firing import Bounds
from tests.model.players import Plan, Todo

_ACK = ("ack",)
_A1, _A2, _B1 = Todo("a", "a1", _ACK), Todo("a", "a2", _ACK), Todo("b", "b1", _ACK)
_EVERY = ("ack", "redeliver", "retry", "bury", "lost")

SMALL = {
    "three tasks of two queues, any one fault": Plan((_A1, _A2, _B1), faults=1),
    "two tasks, any two faults": Plan((_A1, _A2), faults=2),
    "every verb, and a task of a higher priority": Plan(
        (_A1._replace(verbs=_EVERY[2:]), _A2._replace(priority=8)), faults=1, failovers=0
    ),
    "delay, deadline and cancel": Plan(
        (Todo("a", "a1", _ACK, mortal=True, delayed=True, cancelled=True), _A2),
        faults=1,
    ),
    "one in flight at most": Plan((_A1._replace(verbs=_EVERY[:2]), _A2), faults=1, max_inflight=1),
    "a replica confirms, and workers leave": Plan(
        (_A1._replace(verbs=_EVERY[:2]), _A2), faults=1, replicated=True, leaving=True
    ),
}
"""Bounds of the explorations in a test run; together they take some seconds."""

LARGE = SMALL | {
    "three tasks of two queues, every fault at once": Plan((_A1, _A2, _B1)),
    "three tasks of two queues, handed back, any two faults": Plan(
        tuple(one._replace(verbs=_EVERY[:2]) for one in (_A1, _A2, _B1)), faults=2
    ),
    "three tasks, batches of two, any one fault": Plan(
        (_A1._replace(verbs=_EVERY[:2]), _A2, Todo("a", "a3", _ACK)), faults=1, limit=2
    ),
    "every verb, any two faults": Plan((_A1._replace(verbs=_EVERY), _A2), faults=2),
}
"""Bounds of the explorations on demand: up to three tasks, two queues, two workers, one crash, one lost answer and one
failover. They take some minutes."""

FIRING = {
    "a schedule that makes up for all": Bounds(),
    "a schedule whose queue is full": Bounds(capacity=1, late=1, repeated=0),
    "a schedule that makes up for the last": Bounds(catch_up="last", late=2),
    "a schedule without overlap, changed twice": Bounds(
        "none", is_unique=True, changes=2, repeated=0
    ),
}
"""Bounds of the explorations of schedules in a test run"""

FIRING_LARGE = FIRING | {
    "a full queue, requests that arrive again": Bounds(capacity=1, late=1),
    "a schedule that makes up for the last of four": Bounds(catch_up="last", late=2, instants=4),
    "a full queue, changed twice": Bounds(capacity=1, late=2, instants=4, changes=2),
    "no overlap, requests that arrive again": Bounds(
        is_unique=True, instants=5, repeated=2, changes=2
    ),
}
"""Bounds of the explorations of schedules on demand"""

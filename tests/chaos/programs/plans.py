"""What should happen to each task: its producer decides it, and any consumer that gets the task carries it out."""

from __future__ import annotations

import random
from typing import Literal

import msgspec

from taskqueue_core.limits import LIMITS
from tests.chaos.programs.common import Setup

Will = Literal["ack", "retry", "back", "bury", "hang"]
_WILLS: tuple[Will, ...] = ("ack", "retry", "back", "bury")
_WEIGHTS = (85, 8, 4, 3)
_DELAYED = 0.06
_MORTAL = 0.03
_HANGING = 0.02


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan for one task. It is a function of the seed, the producer's number and the task's number."""

    id: str
    key: str
    will: Will = "ack"
    priority: int = 5
    delay: float | None = None
    lifetime: float | None = None
    tenant: str | None = None
    ordering_key: str | None = None
    padding: int = 100
    """number of bytes that the payload has in addition to the plan"""


def plan_of(setup: Setup, number: int) -> Plan:
    """Return the plan for a producer's task with the given number."""
    chance = random.Random(f"{setup.seed} {setup.number} {number}")
    name = f"p{setup.number}-{number}"
    key = chance.choice(setup.keys)
    more = random.Random(f"{setup.seed} {setup.number} {number} order")
    whose, whom = _tenant(setup, more), _entity(setup, more)
    if setup.simple:
        return Plan(id=name, key=key, tenant=whose, ordering_key=whom)
    will = chance.choices(_WILLS, _WEIGHTS)[0]
    if key in setup.hanging and more.random() < _HANGING:
        will = "hang"
    return Plan(
        id=name,
        key=key,
        will=will,
        tenant=whose,
        ordering_key=whom,
        priority=chance.choice(setup.priorities),
        delay=chance.uniform(0.05, 0.6) if chance.random() < _DELAYED else None,
        lifetime=chance.uniform(0.3, 3.0) if chance.random() < _MORTAL else None,
        padding=LIMITS.payload - 100 if more.random() < setup.large else 100,
    )


def _tenant(setup: Setup, chance: random.Random) -> str | None:
    if not setup.tenants:
        return None
    return f"t{0 if chance.random() < 0.5 else chance.randrange(setup.tenants)}"


def _entity(setup: Setup, chance: random.Random) -> str | None:
    if not setup.entities or not (setup.keyed or chance.random() < 0.5):
        return None
    return f"e{chance.randrange(setup.entities)}"

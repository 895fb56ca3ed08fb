"""Who takes part in a small world, and within which bounds."""

from __future__ import annotations

from typing import NamedTuple

from tests.model.books import Name
from tests.model.laws import Receipt

AGE = 1_000_000
"""until what is for later is due: more than all steps take together"""


class Todo(NamedTuple):
    """A task, and what may be done with it."""

    key: str
    id: str
    verbs: tuple[str, ...] = ("ack", "redeliver")
    priority: int = 5
    mortal: bool = False
    """whether it has a deadline, after all that is due once"""
    delayed: bool = False
    cancelled: bool = False
    """whether an operator may cancel it"""


class Plan(NamedTuple):
    """The bounds."""

    todo: tuple[Todo, ...]
    crashes: int = 1
    lost: int = 1
    failovers: int = 1
    faults: int = 3
    """of all kinds together"""
    attempts: int = 2
    limit: int = 1
    """of a receive"""
    max_inflight: int = 0
    max_losses: int = 1
    replicated: bool = False
    """whether a publish is confirmed only once the replica has it"""
    leaving: bool = False
    """whether workers may end in order"""


class Held(NamedTuple):
    """A delivery in a worker's hands."""

    name: Name
    receipt: Receipt
    attempt: int
    verb: str = ""
    """as it is to be settled: the answer to that was lost"""


class Worker(NamedTuple):
    """What a worker knows."""

    name: str
    starts: int = 1
    alive: bool = True
    held: tuple[Held, ...] = ()
    doubt: int = 0
    """1: something may have come that it has not seen; 2: and what it settled may be undone"""
    turn: int = 0

    @property
    def token(self) -> str:
        """Its name at the store."""
        return f"{self.name}.{self.starts}"

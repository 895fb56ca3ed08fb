"""The participants of the small model (tasks and workers), and the bounds of its exploration."""

from __future__ import annotations

from typing import NamedTuple

from tests.model.books import Name
from tests.model.laws import Receipt

AGE = 1_000_000
"""time until a delayed task is due: longer than any sequence of steps takes"""


class Todo(NamedTuple):
    """A task of the plan, and what may happen to it."""

    key: str
    id: str
    verbs: tuple[str, ...] = ("ack", "redeliver")
    priority: int = 5
    mortal: bool = False
    """whether it has a deadline, which is later than the due time of delayed tasks"""
    delayed: bool = False
    cancelled: bool = False
    """whether an operator may cancel it"""


class Plan(NamedTuple):
    """The bounds of an exploration: its tasks, and how many faults of each kind may happen."""

    todo: tuple[Todo, ...]
    crashes: int = 1
    lost: int = 1
    failovers: int = 1
    faults: int = 3
    """maximum number of faults of all kinds together"""
    attempts: int = 2
    limit: int = 1
    """maximum number of deliveries per receive"""
    max_inflight: int = 0
    max_losses: int = 1
    replicated: bool = False
    """whether a publish is confirmed only once the replica has it"""
    leaving: bool = False
    """whether workers may end gracefully"""


class Held(NamedTuple):
    """A delivery that a worker has in hand."""

    name: Name
    receipt: Receipt
    attempt: int
    verb: str = ""
    """verb of a settlement that was sent and whose answer was lost; empty if none was sent"""


class Worker(NamedTuple):
    """What a worker knows: its deliveries, and whether its view may be incomplete."""

    name: str
    starts: int = 1
    alive: bool = True
    held: tuple[Held, ...] = ()
    doubt: int = 0
    """1 if an unseen delivery may exist; 2 if settlements may also have been undone by a failover; otherwise 0"""
    turn: int = 0

    @property
    def token(self) -> str:
        """Token under which the store knows this start of the worker."""
        return f"{self.name}.{self.starts}"

"""Visits every state of a small world, breadth first: what breaks a law is shown by one of the shortest ways to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from typing import NamedTuple, Protocol


class Broken(Exception):
    """A law does not hold: which, and what was seen."""


class World(Protocol):
    """A state, and what can happen next."""

    def key(self) -> Hashable:
        """Return what the state is known by: the same for all that differ in names alone."""
        ...

    def steps(self) -> Iterator[tuple[str, World | Broken]]:
        """Give everything that can happen, told in words, and what the state is then, or which law is broken by it."""
        ...


class Explored(NamedTuple):
    """What was found."""

    states: int
    steps: int
    depth: int
    """steps to the state that is the farthest"""
    counterexample: str = ""
    """how a law is broken; empty where none is"""


class _Way(NamedTuple):
    """How a state was reached."""

    before: _Way | None
    told: str
    length: int


def explore(start: World, most: int = 10_000_000) -> Explored:
    """Visit every state; stop at the first broken law.

    Raises `OverflowError` where there are more than ``most``, rather than leave some out.
    """
    seen = {start.key()}
    waiting: deque[tuple[World, _Way]] = deque([(start, _Way(None, "", 0))])
    steps = depth = 0
    while waiting:
        world, way = waiting.popleft()
        depth = way.length
        for told, following in world.steps():
            steps += 1
            if following is world:
                continue
            onward = _Way(way, told, way.length + 1)
            if isinstance(following, Broken):
                return Explored(len(seen), steps, onward.length, _story(onward, following))
            key = following.key()
            if key not in seen:
                seen.add(key)
                waiting.append((following, onward))
                if len(seen) > most:
                    raise OverflowError(f"more than {most} states")
    return Explored(len(seen), steps, depth)


def _story(way: _Way, broken: Broken) -> str:
    lines = [f"{broken}"]
    step: _Way | None = way
    while step is not None and step.before is not None:
        lines.append(f"  {step.length:2}. {step.told}")
        step = step.before
    return "\n".join(reversed(lines))

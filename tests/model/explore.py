"""Visits every state of a small model, breadth first, so that a broken law is shown by a shortest sequence of steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from typing import NamedTuple, Protocol


class Broken(Exception):
    """A law is violated. The message names the rule and what was observed."""


class World(Protocol):
    """A state of the explored system, and the steps that lead from it."""

    def key(self) -> Hashable:
        """Return a key that is equal for states that differ only in names."""
        ...

    def steps(self) -> Iterator[tuple[str, World | Broken]]:
        """Yield a description of each possible step, with the state that follows or the law that it breaks."""
        ...


class Explored(NamedTuple):
    """Result of an exploration."""

    states: int
    steps: int
    depth: int
    """number of steps to the most distant state"""
    counterexample: str = ""
    """the steps that break a law; empty if no law is broken"""


class _Way(NamedTuple):
    """How a state was reached: the previous state's path and the last step."""

    before: _Way | None
    told: str
    length: int


def explore(start: World, most: int = 10_000_000) -> Explored:
    """Visit every state; stop at the first broken law.

    Raises `OverflowError` if there are more than ``most`` states, so that an incomplete exploration never passes.
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

"""Visits every state of the small models of the system.

python3 dev.py model [--small] [--schedules]

By default it explores the large bounds, which takes minutes; with --small it explores those of the tests. With
--schedules it explores the models of schedules only, and it counts the fires that it has checked.
"""

from __future__ import annotations

import sys
import time
from collections import Counter

from tests.model.explore import World, explore
from tests.model.firing import Firing
from tests.model.plans import FIRING, FIRING_LARGE, LARGE, SMALL
from tests.model.small import Small


def worlds(*, small: bool, tasks: bool) -> dict[str, World]:
    """Return the first state of each model, by what it is a model of; without ``tasks`` only those of schedules."""
    plans, bounds = (SMALL, FIRING) if small else (LARGE, FIRING_LARGE)
    found: dict[str, World] = {name: Small(plan) for name, plan in plans.items()} if tasks else {}
    return found | {name: Firing(one) for name, one in bounds.items()}


def main(arguments: list[str]) -> int:
    """Explore each model and print what was found; return 1 if a law is broken, otherwise 0."""
    states = broken = 0
    requests = Counter[str]()
    chosen = worlds(small="--small" in arguments, tasks="--schedules" not in arguments)
    for name, world in chosen.items():
        began = time.monotonic()
        found = explore(world)
        states += found.states
        broken += bool(found.counterexample)
        requests += world.requests if isinstance(world, Firing) else Counter()
        seconds = time.monotonic() - began
        line = f"{name}: {found.states:,} states, {found.steps:,} steps, {found.depth} deep, {seconds:.0f} s"
        print(line, *found.counterexample.splitlines(), sep="\n", flush=True)  # noqa: T201 - a command
    fires = ", ".join(f"{number:,} {what}" for what, number in sorted(requests.items()))
    print(f"In all {states:,} states; {broken} worlds with a broken law; fires: {fires}.")  # noqa: T201 - a command
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

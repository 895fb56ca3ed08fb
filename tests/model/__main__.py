"""Visits every state of the small models of the system.

python3 dev.py model [--small]

By default it explores the large bounds, which takes minutes; with --small it explores those of the tests.
"""

from __future__ import annotations

import sys
import time

from tests.model.explore import explore
from tests.model.plans import LARGE, SMALL
from tests.model.small import Small


def main(arguments: list[str]) -> int:
    """Explore each model and print what was found; return 1 if a law is broken, otherwise 0."""
    states = broken = 0
    for name, plan in (SMALL if "--small" in arguments else LARGE).items():
        began = time.monotonic()
        found = explore(Small(plan))
        states += found.states
        broken += bool(found.counterexample)
        seconds = time.monotonic() - began
        line = f"{name}: {found.states:,} states, {found.steps:,} steps, {found.depth} deep, {seconds:.0f} s"
        print(line, *found.counterexample.splitlines(), sep="\n", flush=True)  # noqa: T201 - a command
    print(f"In all {states:,} states; {broken} worlds with a broken law.")  # noqa: T201 - a command
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

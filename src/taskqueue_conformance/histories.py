"""The base class of the two state machines. Each random history has a fresh backend and an event loop of its own."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Coroutine, Sequence
from typing import Any, ClassVar, TypeVar
from unittest.mock import patch

from hypothesis import HealthCheck, seed, settings
from hypothesis.internal.conjecture import engine
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from taskqueue_conformance.bench import Bench
from taskqueue_conformance.harness import Harness

SEED = "TASKQUEUE_KIT_SEED"
"""environment variable with the seed of the random histories; without it, each run has another seed"""
SHRINKING = 45
"""maximum time, in seconds of real time, for which Hypothesis looks for a shorter history that fails"""

T = TypeVar("T")


class BackendMachine(RuleBasedStateMachine):
    """A Hypothesis state machine that opens a fresh backend for each random history."""

    harness: ClassVar[Harness]

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.opened = Bench.opened(self.harness)
        self.bench: Bench = self.runner.run(self.opened.__aenter__())

    @staticmethod
    def latest(items: Sequence[T], *indexes: int) -> list[T]:
        """Return the items at ``indexes``, counted back from the last item, modulo the number of items."""
        return [items[-1 - index % len(items)] for index in indexes] if items else []

    def teardown(self) -> None:
        """Check and close the backend, and close the event loop."""
        try:
            self.runner.run(self.opened.__aexit__(None, None, None))
        finally:
            self.runner.close()

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to completion, and return its result."""
        return self.runner.run(call)


def play(machine: type[BackendMachine], harness: Harness, steps: int) -> None:
    """Run random histories of up to ``steps`` calls each, on backends that ``harness`` opens.

    After a failure, Hypothesis looks for a shorter history for up to `SHRINKING` seconds. The error names the seed with
    which the same histories run again.
    """
    chosen = settings(
        max_examples=harness.max_examples,
        stateful_step_count=steps,
        deadline=None,
        print_blob=True,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    played = type("Machine", (machine,), {"harness": harness})
    number = int(os.environ.get(SEED, random.SystemRandom().getrandbits(32)))
    if not chosen.derandomize:
        played = seed(number)(played)
    with patch.object(engine, "MAX_SHRINKING_SECONDS", SHRINKING):
        try:
            run_state_machine_as_test(played, settings=chosen)
        except Exception as error:
            if not chosen.derandomize:
                error.add_note(f"To run these histories again, set {SEED}={number}")
            raise

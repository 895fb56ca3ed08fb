"""The frame of both state machines: a backend in an event loop of its own, and how a machine is run."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, ClassVar, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from taskqueue_conformance.bench import Bench
from taskqueue_conformance.harness import Harness

T = TypeVar("T")


class BackendMachine(RuleBasedStateMachine):
    """A state machine that calls a backend of its own."""

    harness: ClassVar[Harness]

    def __init__(self) -> None:
        """Open a backend, in an event loop of its own."""
        super().__init__()
        self.runner = asyncio.Runner()
        self.opened = Bench.opened(self.harness)
        self.bench: Bench = self.runner.run(self.opened.__aenter__())

    def teardown(self) -> None:
        """Close the backend and the loop."""
        try:
            self.runner.run(self.opened.__aexit__(None, None, None))
        finally:
            self.runner.close()

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a call to its end."""
        return self.runner.run(call)


def play(machine: type[BackendMachine], harness: Harness, steps: int) -> None:
    """Run random histories of ``steps`` calls each on the backend of ``harness``."""
    run_state_machine_as_test(
        type("Machine", (machine,), {"harness": harness}),
        settings=settings(
            max_examples=harness.max_examples,
            stateful_step_count=steps,
            deadline=None,
            print_blob=True,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )

"""The base class of the two state machines. Each random history has a fresh backend and an event loop of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, ClassVar, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from taskqueue_conformance.bench import Bench
from taskqueue_conformance.harness import Harness

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
    """Run random histories of up to ``steps`` calls each, on backends that ``harness`` opens."""
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

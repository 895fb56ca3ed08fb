"""Run tests of the conformance kit in this process and return which passed."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

from taskqueue_conformance import Bench, Harness
from taskqueue_conformance.selection import missing
from taskqueue_core.clock import ManualClock
from tests.clock import JumpingLoop
from tests.conformance.facade import Broken, Facade, backend_of


def suite_on(broken: Broken, suite: type[Harness], *, patience: float = 5.0) -> Any:
    """Return an instance of ``suite`` for a backend; ``patience`` is how many seconds its tests wait at most."""
    backend = backend_of(broken)

    class Suite(suite):  # type: ignore[misc, valid-type]
        async def open_backend(self, clock: ManualClock) -> Facade:
            return backend(clock)

        async def reopen(self, backend: Facade) -> Facade:
            await backend.aclose()
            return type(backend)(backend.clock)

    Suite.capabilities = backend(ManualClock()).capabilities
    Suite.patience = patience
    return Suite()


def outcomes(suite: Harness, *only: str) -> dict[str, str]:
    """Run the named tests, or all async tests that apply; return ``passed`` or ``failed`` for each.

    The event loop does not wait for timers.
    """
    found = async_tests(suite)
    names = only or [name for name, test in found.items() if missing(type(suite), test) is None]
    values = {}
    for name in names:
        with asyncio.Runner(loop_factory=JumpingLoop) as runner:
            values[name] = runner.run(_outcome(suite, found[name]))
    return values


def laws(suite: Harness, test: str) -> set[str]:
    """Return the numbers of the laws that a test's docstring names."""
    text = inspect.getdoc(getattr(suite, test)) or ""
    listed = re.findall(r"laws? ((?:\d+(?:, )?)+)", text)
    return {law for numbers in listed for law in numbers.removesuffix(", ").split(", ")}


def async_tests(suite: Harness) -> dict[str, Callable[..., Any]]:
    """Return the async tests of a suite by name, including those that do not apply."""
    every = inspect.getmembers(suite, inspect.iscoroutinefunction)
    return {name: test for name, test in every if name.startswith("test_")}


async def _outcome(suite: Harness, test: Callable[..., Any]) -> str:
    try:
        async with Bench.opened(suite) as bench:
            await test(bench)
    except (Exception, pytest.fail.Exception):  # noqa: BLE001 - a broken backend can fail in any way
        return "failed"
    return "passed"

"""Runs tests of the kit in this process, one after another, and says which failed."""

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
    """Return ``suite`` over a backend; little ``patience`` where what hangs is meant to."""
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
    """Run the async tests of a suite that apply, or ``only`` some: each ``passed`` or ``failed``; no waiting."""
    found = async_tests(suite)
    names = only or [name for name, test in found.items() if missing(type(suite), test) is None]
    values = {}
    for name in names:
        with asyncio.Runner(loop_factory=JumpingLoop) as runner:
            values[name] = runner.run(_outcome(suite, found[name]))
    return values


def laws(suite: Harness, test: str) -> set[str]:
    """Return the laws that a test's docstring names."""
    text = inspect.getdoc(getattr(suite, test)) or ""
    listed = re.findall(r"laws? ((?:\d+(?:, )?)+)", text)
    return {law for numbers in listed for law in numbers.removesuffix(", ").split(", ")}


def async_tests(suite: Harness) -> dict[str, Callable[..., Any]]:
    """Return the async tests of a suite, those that do not apply among them."""
    every = inspect.getmembers(suite, inspect.iscoroutinefunction)
    return {name: test for name, test in every if name.startswith("test_")}


async def _outcome(suite: Harness, test: Callable[..., Any]) -> str:
    try:
        async with Bench.opened(suite) as bench:
            await test(bench)
    except (Exception, pytest.fail.Exception):  # noqa: BLE001 - however a broken backend fails
        return "failed"
    return "passed"

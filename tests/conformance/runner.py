"""Runs tests of the kit in this process, one after another, and says what became of them."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

from taskqueue_core.clock import ManualClock
from taskqueue_core.conformance import Bench, Harness
from tests.conformance.facade import Facade

_AT_ONCE = 4
"""tests in real time; more of them would keep each other from being in time"""


def suite_on(backend: type[Facade], suite: type[Harness], *, patience: float = 5.0) -> Any:
    """Return ``suite`` over a backend; little ``patience`` where what hangs is meant to."""

    class Suite(suite):  # type: ignore[misc, valid-type]
        async def open_backend(self, clock: ManualClock) -> Facade:
            return backend(clock)

        async def reopen(self, backend: Facade) -> Facade:
            await backend.aclose()
            return type(backend)(backend.clock)

    Suite.patience = patience
    return Suite()


def outcomes(suite: Harness, *only: str) -> dict[str, str]:
    """Run the async tests of a suite; say of each that it ``passed``, or why it was skipped or ``failed``."""
    return {
        name: asyncio.run(_outcome(suite, test))
        for name, test in _tests(suite).items()
        if not only or name in only
    }


def outcomes_in_real_time(suite: Harness) -> dict[str, str]:
    """Do as `outcomes` does, a few tests at once: what they do is wait."""

    async def together() -> dict[str, str]:
        turns = asyncio.Semaphore(_AT_ONCE)

        async def one(test: Callable[..., Any]) -> str:
            async with turns:
                return await _outcome(suite, test)

        found = _tests(suite)
        told = await asyncio.gather(*map(one, found.values()))
        return dict(zip(found, told, strict=True))

    return asyncio.run(together())


def laws(suite: Harness, test: str) -> set[str]:
    """Return the laws that a test's docstring names."""
    text = inspect.getdoc(getattr(suite, test)) or ""
    listed = re.findall(r"laws? ((?:\d+(?:, )?)+)", text)
    return {law for numbers in listed for law in numbers.removesuffix(", ").split(", ")}


def _tests(suite: Harness) -> dict[str, Callable[..., Any]]:
    every = inspect.getmembers(suite, inspect.iscoroutinefunction)
    return {name: test for name, test in every if name.startswith("test_")}


async def _outcome(suite: Harness, test: Callable[..., Any]) -> str:
    try:
        async with Bench.opened(suite) as bench:
            await test(bench)
    except pytest.skip.Exception as skipped:
        return str(skipped)
    except (Exception, pytest.fail.Exception):  # noqa: BLE001 - however a broken backend fails
        return "failed"
    return "passed"

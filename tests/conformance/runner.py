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
    found = {}
    for name, test in inspect.getmembers(suite, inspect.iscoroutinefunction):
        if name in only or (not only and name.startswith("test_")):
            try:
                asyncio.run(_run(suite, test))
            except pytest.skip.Exception as skipped:
                found[name] = str(skipped)
            except (Exception, pytest.fail.Exception):  # noqa: BLE001 - however a broken backend fails
                found[name] = "failed"
            else:
                found[name] = "passed"
    return found


def laws(suite: Harness, test: str) -> set[str]:
    """Return the laws that a test's docstring names."""
    text = inspect.getdoc(getattr(suite, test)) or ""
    listed = re.findall(r"laws? ((?:\d+(?:, )?)+)", text)
    return {law for numbers in listed for law in numbers.removesuffix(", ").split(", ")}


async def _run(suite: Harness, test: Callable[..., Any]) -> None:
    async with Bench.opened(suite) as bench:
        await test(bench)

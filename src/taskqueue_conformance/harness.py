"""The class that the author of a backend subclasses, and the fixture that the tests of the kit use."""

from __future__ import annotations

import inspect
import os
from collections.abc import AsyncIterator, Collection
from typing import Any, ClassVar

import pytest
import pytest_asyncio

from taskqueue_conformance.bench import Bench
from taskqueue_conformance.selection import Need, add_needs
from taskqueue_core.backend import Backend, Capabilities
from taskqueue_core.clock import ManualClock

_FAR = 100_000.0
"""Seconds that do not pass by themselves during a test."""


class Harness:
    """The base of every module of the kit. `open_backend` is all that an author must write.

    The names here and ``test_…`` are all that the kit takes of a class: the author's own attributes may have any other.
    """

    __taskqueue_conformance__ = True
    capabilities: ClassVar[Capabilities] = Capabilities()
    """what the backend must declare; tests that need more are not collected"""
    manual_clock: ClassVar[bool] = True
    """whether the backend uses the clock that it is given; if not, the kit sleeps for real"""
    short: ClassVar[float] = 0.5
    """seconds that count as a while: with a manual clock they cost nothing"""
    patience: ClassVar[float] = 5.0
    """real seconds after which a call that should have ended counts as hanging"""
    max_examples: ClassVar[int] = int(os.environ.get("TASKQUEUE_KIT_EXAMPLES", "100"))
    """random histories that the state machine tries"""

    def __init_subclass__(cls, *, needs: Collection[Need] = (), **options: Any) -> None:
        """Note what all tests of this class need, and mark the async ones, for pytest-asyncio's strict mode."""
        super().__init_subclass__(**options)
        for test in (test for name, test in vars(cls).items() if name.startswith("test_")):
            if needs:
                add_needs(test, needs)
            if inspect.iscoroutinefunction(test):
                pytest.mark.asyncio(loop_scope="function")(test)

    async def open_backend(self, clock: ManualClock) -> Backend:
        """Make an empty backend that shares nothing with earlier ones and takes its time from ``clock`` if it can."""
        raise NotImplementedError(f"{type(self).__name__} must define open_backend(clock)")

    async def replica(self, backend: Backend) -> Backend:
        """Make another backend on the same store, as another process would. For backends that are ``shared``."""
        raise NotImplementedError(
            f"{type(self).__name__} must define replica(backend): its backend is shared"
        )

    async def reopen(self, backend: Backend) -> Backend:
        """Close ``backend`` and make another on what it left behind. For backends that are ``durable``."""
        if type(self).replica is Harness.replica:
            raise NotImplementedError(
                f"{type(self).__name__} must define reopen(backend): its backend is durable"
            )
        await backend.aclose()
        return await self.replica(backend)

    @pytest_asyncio.fixture(loop_scope="function")
    async def bench(self) -> AsyncIterator[Bench]:
        """Give the test a backend of its own."""
        async with Bench.opened(self) as bench:
            yield bench

    @pytest.mark.asyncio(loop_scope="function")
    async def test_capabilities(self, bench: Bench) -> None:
        """The class declares what its backend declares: so no test is left out that applies (G6)."""
        name, capabilities = type(self).__name__, bench.backend.capabilities
        assert self.capabilities == capabilities, (
            f"{name} declares {_describe(self.capabilities)}; its backend declares {_describe(capabilities)}: "
            f"set `capabilities` of {name} to what the backend must have, and make both the same"
        )
        before = bench.now
        await bench.clock.advance(_FAR)
        lives_by_it = bench.now - before > _FAR / 2
        assert lives_by_it is self.manual_clock, (
            f"manual_clock is {self.manual_clock} in {name}, but the backend's time "
            f"{'follows' if lives_by_it else 'does not follow'} the clock that open_backend was given"
        )


def _describe(capabilities: Capabilities) -> str:
    flags = [flag for flag in ("atomic_retry", "durable", "shared") if getattr(capabilities, flag)]
    return ", ".join([*sorted(capabilities.names), *flags]) or "nothing"

"""What the author of a backend writes, and the fixture that every test of the kit runs on."""

from __future__ import annotations

import inspect
import os
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import pytest
import pytest_asyncio

from taskqueue_core.backend import Backend
from taskqueue_core.clock import ManualClock
from taskqueue_core.conformance.bench import Bench

__all__ = ["Harness"]


class Harness:
    """The base of every module of the kit. `open_backend` is all that an author must write.

    The names here and ``test_…`` are all that the kit takes of a class: the author's own attributes may have any other.
    """

    __taskqueue_conformance__ = True
    manual_clock: ClassVar[bool] = True
    """whether the backend lives by the clock it is given; if not, the kit really sleeps"""
    short: ClassVar[float] = 0.5
    """seconds that count as a while: with a manual clock they cost nothing"""
    patience: ClassVar[float] = 5.0
    """real seconds after which a call that should have ended counts as hanging"""
    max_examples: ClassVar[int] = int(os.environ.get("TASKQUEUE_KIT_EXAMPLES", "100"))
    """random histories that the state machine tries"""

    def __init_subclass__(cls, **options: Any) -> None:
        """Mark the async tests for pytest-asyncio, so that they run in its strict mode too."""
        super().__init_subclass__(**options)
        for name, test in vars(cls).items():
            if name.startswith("test_") and inspect.iscoroutinefunction(test):
                pytest.mark.asyncio(loop_scope="function")(test)

    async def open_backend(self, clock: ManualClock) -> Backend:
        """Make an empty backend that shares nothing with earlier ones and takes its time from ``clock`` if it can."""
        raise NotImplementedError(f"{type(self).__name__} must define open_backend(clock)")

    async def replica(self, backend: Backend) -> Backend:
        """Make another backend on the same store, as another process would. For backends that are ``shared``."""
        pytest.skip(f"{type(self).__name__} does not define replica() of {type(backend).__name__}")

    async def reopen(self, backend: Backend) -> Backend:
        """Close ``backend`` and make another on what it left behind. For backends that are ``durable``."""
        if type(self).replica is Harness.replica:
            pytest.skip(
                f"{type(self).__name__} does not define reopen() of {type(backend).__name__}"
            )
        await backend.aclose()
        return await self.replica(backend)

    @pytest_asyncio.fixture(loop_scope="function")
    async def bench(self) -> AsyncIterator[Bench]:
        """Give the test a backend of its own."""
        async with Bench.opened(self) as bench:
            yield bench

"""The base class of all test suites of the kit."""

from __future__ import annotations

import inspect
import os
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import pytest
import pytest_asyncio

from taskqueue_conformance.bench import Bench
from taskqueue_conformance.selection import Need, add_needs
from taskqueue_core.backend import Backend, Capabilities
from taskqueue_core.clock import ManualClock

_FAR = 100_000.0
"""duration in seconds that is longer than any test"""


class Harness:
    """The base class of all suites of the kit.

    A backend's author subclasses a suite and defines at least `open_backend`.

    The kit uses only the names defined here and names that start with ``test_``. All other names are free for the
    author's own attributes.
    """

    __taskqueue_conformance__ = True
    capabilities: ClassVar[Capabilities] = Capabilities()
    """what the backend must declare; tests that need other capabilities are not collected"""
    manual_clock: ClassVar[bool] = True
    """whether the backend uses the clock passed to `open_backend`; if not, the tests sleep in real time"""
    short: ClassVar[float] = 0.5
    """length of a short delay in the tests, in seconds of the store's clock"""
    patience: ClassVar[float] = 5.0
    """seconds of real time after which a test fails if a call has not returned"""
    silence: ClassVar[float] = 10.0
    """seconds of real time within which the deliveries of a killed process must become available again"""
    max_examples: ClassVar[int] = int(os.environ.get("TASKQUEUE_KIT_EXAMPLES", "100"))
    """number of random histories that each state machine tries"""

    def __init_subclass__(cls, *, needs: Collection[Need] = (), **options: Any) -> None:
        """Add ``needs`` to every test of the class, and mark async tests, as pytest-asyncio's strict mode requires."""
        super().__init_subclass__(**options)
        for test in (test for name, test in vars(cls).items() if name.startswith("test_")):
            if needs:
                add_needs(test, needs)
            if inspect.iscoroutinefunction(test):
                pytest.mark.asyncio(loop_scope="function")(test)

    async def open_backend(self, clock: ManualClock) -> Backend:
        """Return an empty backend that shares no data with earlier backends, and uses ``clock`` if it can."""
        raise NotImplementedError(f"{type(self).__name__} must define open_backend(clock)")

    async def replica(self, backend: Backend) -> Backend:
        """Return another backend on the same store, as another process would; needed if ``shared`` is declared."""
        raise NotImplementedError(
            f"{type(self).__name__} must define replica(backend), because its backend is shared"
        )

    async def reopen(self, backend: Backend) -> Backend:
        """Close ``backend``, and return another backend on its data.

        Needed if ``durable`` is declared and `replica` is not defined.
        """
        if type(self).replica is Harness.replica:
            raise NotImplementedError(
                f"{type(self).__name__} must define reopen(backend), because its backend is durable"
            )
        await backend.aclose()
        return await self.replica(backend)

    def opener(self, backend: Backend) -> Callable[[], Backend]:
        """Return a function that opens another backend on the store of ``backend`` in a different process.

        Optional: the tests with real processes apply to classes that define it. The function must be importable, so
        that `pickle` can send it to the process, and the backend must use the system's clock. Choose a short interval
        for signs of life: the kit waits up to `silence` seconds for the deliveries of a killed process.
        """
        raise NotImplementedError(f"{type(self).__name__} must define opener(backend)")

    async def stored(self, backend: Backend) -> int:
        """Return the number of records that the store has, of every kind: rows, keys, and members of keys.

        Optional: the test that ended tasks leave no records behind applies to classes that define it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define stored(backend)")

    def failing(self, backend: Backend, writes: int) -> AbstractContextManager[None]:
        """Return a context in which the store carries out ``writes`` writes, and fails at each later one.

        Optional: the tests of a failure within a step apply to classes that define it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define failing(backend, writes)")

    def unanswered(self, backend: Backend) -> AbstractContextManager[None]:
        """Return a context in which the store carries out each commit, but reports an error instead of success.

        Optional: the tests of lost answers apply to classes that define it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define unanswered(backend)")

    @pytest_asyncio.fixture(loop_scope="function")
    async def bench(self) -> AsyncIterator[Bench]:
        """Yield a bench with a fresh backend. After the test, check and close the backend."""
        async with Bench.opened(self) as bench:
            yield bench

    @pytest.mark.asyncio(loop_scope="function")
    async def test_capabilities(self, bench: Bench) -> None:
        """The class declares its backend's capabilities and clock, so that no test that applies is left out (G6)."""
        name, capabilities = type(self).__name__, bench.backend.capabilities
        assert self.capabilities == capabilities, (
            f"{name} declares {_describe(self.capabilities)}; its backend declares {_describe(capabilities)}: "
            f"set `capabilities` of {name} to what the backend must support, or change the backend"
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

"""Fixtures for the core tests: a manual clock, and event loops that do not wait in tests marked ``fast_clock``."""

import pytest

from taskqueue_core.clock import ManualClock
from tests.clock import pytest_asyncio_loop_factories

__all__ = ["clock", "pytest_asyncio_loop_factories"]


@pytest.fixture
def clock() -> ManualClock:
    """A manual clock that gives the backend its time."""
    return ManualClock()

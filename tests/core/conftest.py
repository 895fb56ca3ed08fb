"""The time of a backend. Tests with the mark ``fast_clock`` do not wait."""

import pytest

from taskqueue_core.clock import ManualClock
from tests.clock import pytest_asyncio_loop_factories

__all__ = ["clock", "pytest_asyncio_loop_factories"]


@pytest.fixture
def clock() -> ManualClock:
    """The time of the backend."""
    return ManualClock()

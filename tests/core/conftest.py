"""The time of a backend. Tests with the mark ``passing_time`` do not wait."""

import pytest

from taskqueue_core.clock import ManualClock
from tests.passing_time import pytest_asyncio_loop_factories

__all__ = ["clock", "pytest_asyncio_loop_factories"]


@pytest.fixture
def clock() -> ManualClock:
    """The time of the backend."""
    return ManualClock()

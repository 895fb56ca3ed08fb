"""Tests with the mark ``fast_clock`` do not wait."""

from tests.clock import pytest_asyncio_loop_factories

__all__ = ["pytest_asyncio_loop_factories"]

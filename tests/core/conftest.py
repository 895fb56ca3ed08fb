"""Tests with the mark ``passing_time`` do not wait."""

from tests.passing_time import pytest_asyncio_loop_factories

__all__ = ["pytest_asyncio_loop_factories"]

"""Fixtures for this folder: tests with the mark ``fast_clock`` run on an event loop that skips waiting times."""

from tests.clock import pytest_asyncio_loop_factories

__all__ = ["pytest_asyncio_loop_factories"]

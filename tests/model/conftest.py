"""Fixtures shared with the chaos tests."""

from tests.chaos.conftest import folder

__all__ = ["folder"]

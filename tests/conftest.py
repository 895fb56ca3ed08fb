"""What holds for every test: after a run, each area's time is shown against its budget."""

from tests.areas import pytest_terminal_summary

__all__ = ["pytest_terminal_summary"]

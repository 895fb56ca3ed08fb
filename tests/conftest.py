"""What holds for every test: after a run, each area's time is shown against its budget."""

import signal

from tests.areas import pytest_terminal_summary

__all__ = ["pytest_terminal_summary"]

# A shell starts what it puts in the background with SIGINT ignored, which every process of the tests would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

"""What holds for every test: who runs it, and after a run the time of each area against its budget."""

import signal

from tests.areas import pytest_collection_modifyitems, pytest_xdist_make_scheduler
from tests.budgets import pytest_sessionfinish, pytest_terminal_summary

__all__ = [
    "pytest_collection_modifyitems",
    "pytest_sessionfinish",
    "pytest_terminal_summary",
    "pytest_xdist_make_scheduler",
]

# A shell starts what it puts in the background with SIGINT ignored, which every process of the tests would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

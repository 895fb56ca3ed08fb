"""Settings for all tests: how they are distributed over processes, and the time budget of each area."""

import signal

from tests.areas import pytest_collection_modifyitems, pytest_xdist_make_scheduler
from tests.budgets import pytest_addoption, pytest_sessionfinish, pytest_terminal_summary

__all__ = [
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_sessionfinish",
    "pytest_terminal_summary",
    "pytest_xdist_make_scheduler",
]

# A shell starts background jobs with SIGINT ignored, and all test processes would inherit that. So restore the default.
signal.signal(signal.SIGINT, signal.default_int_handler)

"""What holds for every test: the order, and after a run each area's time against its budget."""

import signal

from tests.areas import (
    pytest_collection_modifyitems,
    pytest_terminal_summary,
    pytest_xdist_make_scheduler,
)

__all__ = [
    "pytest_collection_modifyitems",
    "pytest_terminal_summary",
    "pytest_xdist_make_scheduler",
]

# A shell starts what it puts in the background with SIGINT ignored, which every process of the tests would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

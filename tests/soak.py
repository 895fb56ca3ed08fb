"""Runs the fuzz tests, random histories, the audit and a burst of jobs at a large size. Arguments go to pytest."""

import os
import sys

import pytest

_SIZES = {
    "TASKQUEUE_FUZZ_FRAMES": "1000000",
    "TASKQUEUE_SCHEMA_EXAMPLES": "500",
    "TASKQUEUE_BURST_JOBS": "50000",
    "TASKQUEUE_KIT_EXAMPLES": "1000",
    "TASKQUEUE_SWAP_TASKS": "100000",
    "TASKQUEUE_FIRING_HISTORIES": "20",
    "TASKQUEUE_LINE_HISTORIES": "35000",
}
_TESTS = "fuzz or million or burst or machine or nobody_waits or swap_of_many or histories"
_FOLDERS = (
    "tests/server",
    "tests/spark/test_audit.py",
    "tests/dispatch/test_burst.py",
    "tests/core",
    "tests/memory",
    "tests/redis/test_conformance.py",
)

if __name__ == "__main__":
    os.environ.update(_SIZES)
    sys.exit(pytest.main(["-m", "not chaos", "-k", _TESTS, *_FOLDERS, *sys.argv[1:]]))

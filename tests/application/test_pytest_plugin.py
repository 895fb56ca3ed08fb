"""The fixtures ``taskqueue`` and ``taskqueue_inline`` in a project of their own."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

import taskqueue_worker
from taskqueue_worker import pytest_plugin

pytest_plugins = "pytester"

PROJECT = """
import asyncio
import pytest
from taskqueue_core import Tasks

registry = Tasks()
ran = []

@registry.task
def charge(order: int) -> None:
    ran.append(order)

@pytest.fixture
def tasks():
    return registry

async def test_queue(taskqueue):
    await charge.publish(1)
    taskqueue.assert_published(charge, times=1, order=1)
    assert ran == []
    await taskqueue.drain()
    assert ran == [1]

async def test_inline(taskqueue_inline):
    await charge.publish(2)
    assert ran == [1, 2]

def test_without_a_loop(taskqueue):
    charge.publish_sync(3)
    asyncio.run(taskqueue.drain())
    assert ran == [1, 2, 3]

async def test_fails(taskqueue):
    taskqueue.assert_published(charge, order=4)
"""


def test_fixtures(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """U11: the fixtures work in async tests of pytest-asyncio and anyio, and in tests that are not async."""
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
    pytester.makeini(
        "[pytest]\nasyncio_default_fixture_loop_scope = function\nfilterwarnings = error"
    )
    fixture = '@pytest.fixture\ndef anyio_backend():\n    return "asyncio"\n'
    for runner in ("asyncio", "anyio"):
        page = PROJECT.replace("async def", f"@pytest.mark.{runner}\nasync def") + fixture
        pytester.makepyfile(**{f"test_{runner}": page})
    installed = entry_points(group="pytest11", name="taskqueue-testing")
    plugged = [] if installed else ["-p", pytest_plugin.__name__]
    run = pytester.runpytest_subprocess(*plugged, "-p", "no:schemathesis", "-q")
    run.assert_outcomes(passed=6, failed=2)
    lines = [
        "E*AssertionError: expected charge(order=4) at least once, found 0",
        "E*published: nothing",
    ]
    run.stdout.fnmatch_lines([*lines, *lines])
    run.stdout.no_fnmatch_line("*raise AssertionError*")


def test_each_public_name_can_be_imported() -> None:
    """U11: names that are imported on first use are those of ``__all__``."""
    assert all(
        getattr(taskqueue_worker, name).__name__ == name for name in taskqueue_worker.__all__
    )


def test_loading_is_cheap() -> None:
    """U11: pytest loads the plugin in every run, so the plugin imports nothing of the project until a test needs it."""
    code = (
        "import sys, taskqueue_worker.pytest_plugin; "
        "print(*(name for name in sys.modules if name.startswith('taskqueue_')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["taskqueue_worker", "taskqueue_worker.pytest_plugin"]

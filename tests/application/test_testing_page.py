"""The example of docs/testing.md runs as written, and its messages are those of the code."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from taskqueue_core import Tasks
from taskqueue_worker import pytest_plugin
from taskqueue_worker.testing import TestQueue
from tests.docs.programs import blocks

pytest_plugins = "pytester"

PAGE = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()


def test_example(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """U11: the tests of the page pass in a project of their own."""
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, [str(pytester.path), *sys.path])))
    pytester.makeini(
        "[pytest]\nasyncio_default_fixture_loop_scope = function\nfilterwarnings = error"
    )
    application, tests = blocks(PAGE, "python")
    pytester.mkdir("shop").joinpath("tasks.py").write_text(application)
    pytester.makepyfile(test_shop=tests)
    installed = entry_points(group="pytest11", name="taskqueue-testing")
    plugged = [] if installed else ["-p", pytest_plugin.__name__]
    run = pytester.runpytest_subprocess(*plugged, "-p", "no:schemathesis", "-q")
    run.assert_outcomes(passed=4)


async def test_message() -> None:
    """U11: the page shows the message of a failed assertion as it is."""
    tasks = Tasks(prefix="shop.")

    @tasks.task
    def charge(order: int, amount: int = 5) -> int:
        return order * amount

    (message,) = blocks(PAGE, "text")
    async with TestQueue(tasks) as taskqueue:
        await charge.publish(17)
        with pytest.raises(AssertionError) as caught:
            taskqueue.assert_published(charge, times=1, order=18)
    assert f"AssertionError: {caught.value}" == message.rstrip()

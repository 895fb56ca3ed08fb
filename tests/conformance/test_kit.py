"""The kit itself: what it skips, what it runs on, how pytest sees it."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections import Counter
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import taskqueue_core.conformance as kit
from taskqueue_core.clock import ManualClock
from taskqueue_core.conformance import BackendSuite, Harness, plugin
from taskqueue_core.conformance.entities import EntitiesSuite
from taskqueue_core.conformance.flow import FlowSuite
from taskqueue_core.conformance.processing import ProcessingSuite
from taskqueue_core.conformance.replicas import ReplicasSuite
from taskqueue_core.conformance.room import RoomSuite
from taskqueue_core.conformance.schedule import ScheduleSuite
from taskqueue_core.conformance.slots import SlotsSuite
from taskqueue_core.conformance.tenants import TenantsSuite
from taskqueue_core.conformance.waiting import WaitingSuite
from taskqueue_memory import MemoryBackend
from tests.conformance.facade import Minimal, Replicated, TwoSteps
from tests.conformance.runner import laws, outcomes, outcomes_in_real_time, suite_on

pytest_plugins = "pytester"

AUTHORS_PAGE = """
import pytest
from taskqueue_core.clock import ManualClock
from taskqueue_core.conformance import BackendSuite, Harness
from taskqueue_memory import MemoryBackend

class TestMine(BackendSuite):
    async def open_backend(self, clock: ManualClock) -> MemoryBackend:
        return MemoryBackend(clock=clock)

class TestBroken(Harness):
    async def open_backend(self, clock):
        return MemoryBackend(clock=clock)

    async def test_of_the_author(self, bench):
        await bench.publish("t1")
        await bench.expect(done=1)
"""


def test_undeclared_capabilities_are_skipped() -> None:
    """A backend with nothing beyond the contract passes; what it does not declare is skipped by name (G6)."""
    found = Counter(outcomes(suite_on(Minimal, BackendSuite)).values())
    assert found.pop("passed") > 80
    declared = r"the backend does not declare (the capability '\w+'|'(shared|durable)')"
    assert all(re.fullmatch(declared, reason) for reason in found), found
    named = set(re.findall(r"'(\w+)'", " ".join(found)))
    assert named == {
        "control",
        "dead_letters",
        "durable",
        "fan_out",
        "flow",
        "handover",
        "order",
        "revocation",
        "shared",
        "slots",
    }


def test_retry_in_two_steps() -> None:
    """A backend without atomic retries passes: core retries in two steps, and the one-step tests are skipped."""
    found = outcomes(suite_on(TwoSteps, BackendSuite))
    assert "failed" not in found.values()
    assert found["test_retry_through_core"] == "passed"
    assert found["test_settling_twice"] == "the backend does not declare 'atomic_retry'"


def test_shared_and_durable() -> None:
    """One override, ``replica``, is enough to prove both what is shared and what is durable."""

    class Suite(ReplicasSuite):
        async def open_backend(self, clock: ManualClock) -> Replicated:
            return Replicated(clock)

        async def replica(self, backend: Replicated) -> Replicated:  # type: ignore[override]
            return Replicated(backend.clock, backend.inner)

    assert set(outcomes(Suite()).values()) == {"passed"}


def test_missing_overrides() -> None:
    """Without ``open_backend`` nothing runs; without ``replica`` and ``reopen`` their tests say so and are skipped."""
    assert set(outcomes(ReplicasSuite()).values()) == {"failed"}

    class Suite(ReplicasSuite):
        async def open_backend(self, clock: ManualClock) -> Replicated:
            return Replicated(clock)

    found = set(outcomes(Suite()).values())
    assert found == {
        f"Suite does not define {name}() of Replicated" for name in ("replica", "reopen")
    }


@pytest.mark.parametrize(
    ("concern", "seconds"),
    [
        (ScheduleSuite, 0.2),
        (WaitingSuite, 0.1),
        (FlowSuite, 0.1),
        (TenantsSuite, 0.1),
        (EntitiesSuite, 0.1),
        (ProcessingSuite, 0.1),
        (RoomSuite, 0.1),
        (SlotsSuite, 0.1),
    ],
)
def test_real_time(concern: type[Harness], seconds: float) -> None:
    """A backend that cannot take a clock is tested in short real time.

    What fails so, a few at once on a machine that may be busy, must pass alone in longer times.
    """

    class Suite(concern):  # type: ignore[misc, valid-type]
        manual_clock = False
        short = seconds

        async def open_backend(self, _clock: ManualClock) -> MemoryBackend:
            return MemoryBackend()

    class Longer(Suite):
        short = 4 * seconds

    alone = {f"the backend does not declare {name!r}" for name in ("shared", "durable")}
    found = outcomes_in_real_time(Suite())
    again = [name for name, outcome in found.items() if outcome == "failed"]
    assert len(again) < 4
    found |= outcomes(Longer(), *again) if again else {}
    assert set(found.values()) - alone == {"passed"}


def test_every_test_says_what_it_proves() -> None:
    """Each test of the kit has a docstring, and names no law that does not exist."""
    suite = suite_on(Minimal, BackendSuite)
    tests = [name for name, _ in inspect.getmembers(suite, callable) if name.startswith("test_")]
    assert len(tests) > 330
    for name in tests:
        assert inspect.getdoc(getattr(suite, name)), f"{name} has no docstring"
        assert laws(suite, name) <= {str(law) for law in range(1, 11)}, name


def test_no_test_hides_another() -> None:
    """The modules of the kit are put together as one class: two tests of one name would be one."""
    bases = [base for base in BackendSuite.__mro__ if issubclass(base, Harness)]
    names = Counter(name for base in bases for name in vars(base) if name.startswith("test_"))
    assert [name for name, times in names.items() if times > 1] == []


def test_public_names() -> None:
    """What the package exports is there, and nothing else is."""
    assert kit.__all__ == sorted(kit.__all__)
    for name in kit.__all__:
        assert getattr(kit, name).__name__ == name
    with pytest.raises(AttributeError, match="nonsense"):
        kit.nonsense  # noqa: B018


def test_the_names_of_the_authors_class() -> None:
    """The kit takes few names of an author's class, and the page for authors tells them (G6)."""
    taken = {name for name in dir(BackendSuite) if not name.startswith(("test_", "__"))}
    page = (Path(__file__).parents[2] / "docs" / "writing-a-backend.md").read_text()
    (told,) = re.findall(r"takes these names of the class, (.*?): all others", page, re.DOTALL)
    assert taken == set(re.findall(r"`([a-z_]+)`", told)) - {"test_"}


def test_plugin_knows_the_modules() -> None:
    """Every module of the kit with assertions has them rewritten."""
    files = {path.stem for path in Path(plugin.__file__).parent.glob("*.py")}
    assert files - {"__init__", "plugin", "suite"} == set(plugin.MODULES)


def test_plugin_is_cheap() -> None:
    """The plugin, which pytest imports in every run, brings in neither Hypothesis nor the tests."""
    program = (
        "import sys, taskqueue_core.conformance.plugin as p;"
        "print('hypothesis' in sys.modules, 'taskqueue_core.conformance.suite' in sys.modules);"
        "print(p.__name__ and __import__('taskqueue_core.conformance').conformance.Harness.max_examples)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"TASKQUEUE_KIT_EXAMPLES": "7", "PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["False", "False", "7"]


def test_in_an_authors_project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few lines are enough, in pytest-asyncio's strict mode too; failures show their values (G6)."""
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
    monkeypatch.setenv("TASKQUEUE_KIT_EXAMPLES", "2")
    pytester.makeini(
        "[pytest]\nasyncio_default_fixture_loop_scope = function\nfilterwarnings = error"
    )
    pytester.makepyfile(test_author=AUTHORS_PAGE + "\n\ndef test_unrelated(): pass\n")
    installed = entry_points(group="pytest11", name="taskqueue-conformance")
    plugged = [] if installed else ["-p", plugin.__name__]
    words = (*plugged, "-p", "no:schemathesis", "--strict-markers", "-m", "conformance", "-q")
    run = pytester.runpytest_subprocess(*words)
    counts = run.parseoutcomes()
    assert (counts["failed"], counts["deselected"]) == (1, 1)
    assert counts["passed"] > 300
    assert 0 < counts["skipped"] < 30
    run.stdout.fnmatch_lines(
        ["*assert Ledger(published=1, waiting=1*", "*FAILED*test_of_the_author*"]
    )

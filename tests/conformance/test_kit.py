"""The conformance kit: which tests it selects for a backend, on which backends it passes, and its pytest plugin."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import taskqueue_conformance as kit
from taskqueue_conformance import BackendSuite, Bench, Harness, needs, plugin
from taskqueue_conformance.selection import missing, needs_of
from taskqueue_conformance.suite import SlotsSuite
from taskqueue_conformance.suites.flow import FlowSuite
from taskqueue_conformance.suites.ordering_keys import EntitiesSuite
from taskqueue_conformance.suites.processing import ProcessingSuite
from taskqueue_conformance.suites.publish import PublishSuite
from taskqueue_conformance.suites.replicas import ReplicasSuite
from taskqueue_conformance.suites.room_signal import RoomSuite
from taskqueue_conformance.suites.schedule import ScheduleSuite
from taskqueue_conformance.suites.tenants import TenantsSuite
from taskqueue_conformance.suites.waiting import WaitingSuite
from taskqueue_core.backend import Capabilities, Capability
from taskqueue_core.clock import ManualClock
from taskqueue_memory import MemoryBackend
from tests.clock import LoopClock
from tests.conformance.facade import Facade, Minimal, Replicated, TwoSteps
from tests.conformance.runner import async_tests, laws, outcomes, suite_on

if TYPE_CHECKING:
    from taskqueue_conformance.selection import Need

pytest_plugins = "pytester"

AUTHORS_PAGE = """
from taskqueue_core.backend import Capabilities, Capability
from taskqueue_core.clock import ManualClock
from taskqueue_conformance import BackendSuite, Harness
from taskqueue_memory import MemoryBackend

class TestMine(BackendSuite):
    capabilities = Capabilities(names=frozenset(Capability))

    async def open_backend(self, clock: ManualClock) -> MemoryBackend:
        return MemoryBackend(clock=clock)

class TestBroken(Harness):
    capabilities = TestMine.capabilities

    async def open_backend(self, clock):
        return MemoryBackend(clock=clock)

    async def test_of_the_author(self, bench):
        await bench.publish("t1")
        await bench.expect(done=1)
"""

FORGETFUL_PAGE = """
from taskqueue_conformance.suites.publish import PublishSuite
from taskqueue_memory import MemoryBackend

class TestForgetful(PublishSuite):
    async def open_backend(self, clock):
        return MemoryBackend(clock=clock)
"""

EVERY_NEED: list[Need] = [*Capability, "atomic_retry", "durable", "shared"]

TOO_GOOD = {
    "test_dead_task",
    "test_every_arrow",
    "test_free_retry_of_a_dead_letter",
    "test_states",
    "test_waiting_and_scheduled_tasks",
}
"""tests marked for atomic retries that `TwoSteps` passes too, because it retries a task not in flight in one step"""


def without(need: Need) -> Harness:
    """Return the kit for a backend that has everything except one need."""
    lesser: type[Facade] = Facade  # a plain facade is neither shared nor durable
    if need == "atomic_retry":
        lesser = TwoSteps
    elif isinstance(need, Capability):
        lesser = type("Lesser", (Minimal,), {"names": frozenset(Capability) - {need}})
    suite: Harness = suite_on(lesser, BackendSuite)
    return suite


@pytest.mark.parametrize("need", EVERY_NEED)
def test_what_is_needed_is_needed(need: Need) -> None:
    """Each test that requires a capability fails without it, so that no test is skipped needlessly (G6)."""
    suite = without(need)
    type(suite).patience = 0.05
    those = [name for name, test in async_tests(suite).items() if need in needs_of(test)]
    assert those
    if need == "atomic_retry":
        those = [name for name in those if name not in TOO_GOOD]
    assert set(outcomes(suite, *those).values()) == {"failed"}


def test_what_is_not_needed() -> None:
    """Each test passes on a backend that has no more than the test requires, which for many is no capability (G6)."""
    groups: defaultdict[frozenset[Need], list[str]] = defaultdict(list)
    for name, test in async_tests(suite_on(Facade, BackendSuite)).items():
        groups[frozenset(needs_of(test))].append(name)
    found: dict[str, str] = {}
    for required, names in groups.items():
        lesser = type("Lesser", (Minimal,), {"names": required & frozenset(Capability)})
        suite = suite_on(lesser, BackendSuite)
        tests = async_tests(suite)
        if those := [name for name in names if missing(type(suite), tests[name]) is None]:
            found |= outcomes(suite, *those)
    assert len(groups[frozenset()]) > 80
    assert [name for name, outcome in found.items() if outcome != "passed"] == []


def test_retry_in_two_steps() -> None:
    """A backend without atomic retries passes; tests that retry in one step do not apply to it."""
    found = outcomes(suite_on(TwoSteps, BackendSuite))
    assert set(found.values()) == {"passed"}
    assert "test_retry_through_core" in found
    assert "test_settling_twice" not in found


def test_shared_and_durable() -> None:
    """A class that defines ``replica`` runs the tests for shared and for durable backends."""

    class Suite(ReplicasSuite):
        capabilities = Replicated(ManualClock()).capabilities

        async def open_backend(self, clock: ManualClock) -> Replicated:
            return Replicated(clock)

        async def replica(self, backend: Replicated) -> Replicated:  # type: ignore[override]
            return Replicated(backend.clock, backend.inner)

    found = outcomes(Suite())
    assert set(found) == set(async_tests(Suite()))
    assert set(found.values()) == {"passed"}


async def test_missing_overrides() -> None:
    """If a method that the declared capabilities require is missing, an error names it."""

    class Suite(ReplicasSuite):
        capabilities = Replicated(ManualClock()).capabilities

    suite, backend = Suite(), Replicated(ManualClock())
    for name, argument in (
        ("open_backend", ManualClock()),
        ("replica", backend),
        ("reopen", backend),
    ):
        with pytest.raises(NotImplementedError, match=f"Suite must define {name}"):
            await getattr(suite, name)(argument)


@pytest.mark.parametrize(
    ("declared", "told"),
    [
        (
            Capabilities(),
            r"Suite declares atomic_retry; its backend declares after, audit, control,",
        ),
        (
            Capabilities(names=frozenset(Capability), shared=True),
            r"streams, unique, atomic_retry, shared; its backend declares .*streams, unique, atomic_retry: set",
        ),
    ],
)
async def test_class_and_backend_differ(declared: Capabilities, told: str) -> None:
    """A test fails if the class and its backend declare different capabilities, whatever else does not apply (G6)."""
    suite = suite_on(Facade, PublishSuite)
    type(suite).capabilities = declared
    with pytest.raises(AssertionError, match=told):
        await _look(suite)


async def test_clock_is_as_declared() -> None:
    """A test fails if ``manual_clock`` does not match the backend (G6)."""
    suite = suite_on(Facade, PublishSuite)
    type(suite).manual_clock = False
    with pytest.raises(AssertionError, match="the backend's time follows the clock"):
        await _look(suite)

    class Stubborn(Facade):
        def now(self) -> float:
            return 1.0

    with pytest.raises(AssertionError, match="the backend's time does not follow the clock"):
        await _look(suite_on(Stubborn, PublishSuite))


async def _look(suite: Harness) -> None:
    async with Bench.opened(suite) as bench:
        await suite.test_capabilities(bench)


async def test_reaching_for_what_is_not_declared() -> None:
    """A test that uses an undeclared capability fails, with an error that says how to declare it."""
    async with Bench.opened(suite_on(Minimal, PublishSuite)) as bench:
        with pytest.raises(AssertionError, match=r"'flow': .* marked @needs\(Capability.FLOW\)"):
            await bench.limit(capacity=1)
    with pytest.raises(ValueError, match=r"unknown need: 'flowing'. Use a Capability, or one of"):
        needs("flowing")(_look)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "concern",
    [
        ScheduleSuite,
        WaitingSuite,
        FlowSuite,
        TenantsSuite,
        EntitiesSuite,
        ProcessingSuite,
        RoomSuite,
        SlotsSuite,
    ],
)
def test_time_that_passes(concern: type[Harness]) -> None:
    """A backend that cannot use a manual clock passes the kit, whose tests then use short real times."""

    class Suite(concern):  # type: ignore[misc, valid-type]
        capabilities = Capabilities(names=frozenset(Capability))
        manual_clock = False
        short = 0.1

        async def open_backend(self, _clock: ManualClock) -> MemoryBackend:
            return MemoryBackend(clock=LoopClock())

    found = outcomes(Suite())
    assert set(found.values()) == {"passed"}


async def test_real_seconds() -> None:
    """Without a manual clock, ``bench.advance`` waits for the given time in reality."""

    class Suite(WaitingSuite):
        manual_clock = False

        async def open_backend(self, _clock: ManualClock) -> MemoryBackend:
            return MemoryBackend()

    async with Bench.opened(Suite()) as bench:
        before = bench.now
        await bench.advance(0.05)
        assert bench.now - before >= 0.05


def test_every_test_says_what_it_proves() -> None:
    """Each test of the kit has a docstring, and the laws that it names exist."""
    suite = suite_on(Minimal, BackendSuite)
    tests = [name for name, _ in inspect.getmembers(suite, callable) if name.startswith("test_")]
    assert len(tests) > 330
    for name in tests:
        assert inspect.getdoc(getattr(suite, name)), f"{name} has no docstring"
        assert laws(suite, name) <= {str(law) for law in range(1, 13)}, name


def test_no_test_hides_another() -> None:
    """No two modules of the kit have tests of the same name, because all are combined in one class."""
    bases = [base for base in BackendSuite.__mro__ if issubclass(base, Harness)]
    names = Counter(name for base in bases for name in vars(base) if name.startswith("test_"))
    assert [name for name, times in names.items() if times > 1] == []


def test_public_names() -> None:
    """The package exports exactly the names in ``__all__``."""
    assert kit.__all__ == sorted(kit.__all__)
    for name in kit.__all__:
        assert getattr(kit, name).__name__ == name
    with pytest.raises(AttributeError, match="nonsense"):
        kit.nonsense  # noqa: B018


def test_the_names_of_the_authors_class() -> None:
    """docs/writing-a-backend.md lists all names that the kit reserves in the class of an author (G6)."""
    taken = {name for name in dir(BackendSuite) if not name.startswith(("test_", "__"))}
    page = (Path(__file__).parents[2] / "docs" / "writing-a-backend.md").read_text()
    (values,) = re.findall(r"takes these names of the class, (.*?): all others", page, re.DOTALL)
    assert taken == set(re.findall(r"`([a-z_]+)`", values)) - {"test_"}


def test_plugin_knows_the_modules() -> None:
    """The plugin registers every module of the kit for pytest's assertion rewriting."""
    kit = Path(plugin.__file__).parent
    places = {path.relative_to(kit).parts[0].removesuffix(".py") for path in kit.rglob("*.py")}
    assert places - {"__init__", "plugin", "selection", "suite"} == set(plugin.PARTS)


def test_plugin_is_cheap() -> None:
    """The plugin, which pytest imports in every run, imports neither Hypothesis nor the tests of the kit."""
    program = (
        "import sys, taskqueue_conformance.plugin as p;"
        "print('hypothesis' in sys.modules, 'taskqueue_conformance.suite' in sys.modules);"
        "print(p.__name__ and __import__('taskqueue_conformance').Harness.max_examples)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"TASKQUEUE_KIT_EXAMPLES": "7", "PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["False", "False", "7"]


def test_in_an_authors_project(authors: Callable[..., pytest.RunResult]) -> None:
    """In another project, a few lines run the kit, also in pytest-asyncio's strict mode; failures show values (G6)."""
    run = authors(AUTHORS_PAGE + "\n\ndef test_unrelated(): pass\n", "-m", "conformance")
    counts = run.parseoutcomes()
    assert (counts.pop("failed"), counts.pop("deselected")) == (1, 1)
    assert counts.pop("passed") > 400
    assert not counts, "a test that does not apply is not there: it is not skipped"
    run.stdout.fnmatch_lines(
        [
            "*expected *, got Ledger(published=1, blocked=0, waiting=1*",
            "*FAILED*test_of_the_author*",
        ]
    )


@pytest.mark.parametrize("processes", [0, 1])
def test_what_is_left_out_is_reported(
    authors: Callable[..., pytest.RunResult], processes: int
) -> None:
    """Tests for undeclared capabilities are not collected.

    The summary lists them, and a test fails because the class and its backend differ.
    """
    run = authors(FORGETFUL_PAGE, "-n", str(processes))
    run.assert_outcomes(passed=11, failed=1)
    run.stdout.fnmatch_lines(
        [
            "*conformance: tests that apply to each backend*",
            "test_author.py::TestForgetful: 12 of 14; left out, because the class does not declare: *(1), *(1)",
            "FAILED*::test_capabilities*",
        ]
    )
    run.stdout.no_fnmatch_line("*test_window_ends*")


@pytest.fixture
def authors(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., pytest.RunResult]:
    """Return a function that runs a test module in a separate project with the plugin of the kit."""
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
    monkeypatch.setenv("TASKQUEUE_KIT_EXAMPLES", "2")
    pytester.makeini(
        "[pytest]\nasyncio_default_fixture_loop_scope = function\nfilterwarnings = error"
    )
    installed = entry_points(group="pytest11", name="taskqueue-conformance")
    plugged = [] if installed else ["-p", plugin.__name__]

    def run(page: str, *words: str) -> pytest.RunResult:
        pytester.makepyfile(test_author=page)
        return pytester.runpytest_subprocess(
            *plugged, "-p", "no:schemathesis", "--strict-markers", "-q", *words
        )

    return run


@pytest.mark.parametrize(
    "names",
    [{Capability.FAIR_ORDER}, {Capability.ORDERING_KEYS}, {Capability.FLOOR_SHARE}],
    ids=["fair order", "ordering keys", "floor share"],
)
def test_one_kind_of_order_alone(names: set[Capability]) -> None:
    """A backend may have fair order, ordering keys or a floor share alone; random histories agree (G6)."""
    alone = type("Alone", (Minimal,), {"names": frozenset(names | {Capability.CONTROL})})
    suite = suite_on(alone, BackendSuite)
    suite.max_examples = 10
    suite.test_machine()
    found = outcomes(suite, "test_order_is_kept_or_refused", "test_order_per_entity_or_refused")
    found |= outcomes(suite, "test_floor_share_is_kept_or_refused", "test_capabilities")
    assert set(found.values()) == {"passed"}

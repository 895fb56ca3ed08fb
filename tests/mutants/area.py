"""Load the tests of some folders, measure which lines each test runs, and try mutants with them."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import call_and_report
from coverage import Coverage
from hypothesis import HealthCheck, Phase, settings

from tests.mutants.changes import Mutant
from tests.mutants.copies import Copy
from tests.mutants.forks import Fork, Report
from tests.mutants.live import Loaded
from tests.mutants.selecting import Measured, TestMap
from tests.mutants.trial import ARGUMENTS, End, Trials, forget_modules, run_tests
from tests.mutants.verdicts import caught_by

_SHARED = ("module", "class", "package")
_SLOW = 4.0
"""seconds after which a test is too slow to be used"""
_SLOW_FIXTURE = 25.0
"""seconds for setting up fixtures shared by several tests, such as a Spark session"""


def try_mutants(
    folder: Path,
    tests: Sequence[str],
    suites: Mapping[str, Sequence[Mutant]],
    caught: Mapping[str, str],
    report: Report,
) -> None:
    """Try the mutants of some suites in a new folder, and report a verdict for each.

    ``caught`` has the mutants that an earlier run caught, each with its test; see `Trials.attempt`.
    """
    copy = Copy(folder / "copy")
    # Temporary files of killed processes are removed together with the folder.
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder / "t")
    Path(tempfile.tempdir).mkdir()
    folder = copy.folder
    os.chdir(folder)
    paths = [str(folder / "src"), str(folder)]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    output = folder / "output.txt"
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(written, stream)
    forget_modules()
    # Every run uses the same examples, and Hypothesis does not search for the smallest failing one.
    settings.register_profile(
        "mutants", phases=(Phase.explicit, Phase.generate), derandomize=True, database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    settings.load_profile("mutants")
    area = _Area(copy, suites, caught, report)
    code = pytest.main([*ARGUMENTS, *tests], plugins=[area])
    if not area.done:
        said = output.read_text()[-3000:]
        report("note", f"the tests in {', '.join(tests)} end with {code}, without a run:\n{said}")


class _Area:
    """A pytest plugin that tries mutants in place of the usual run of all tests."""

    def __init__(
        self,
        copy: Copy,
        suites: Mapping[str, Sequence[Mutant]],
        caught: Mapping[str, str],
        report: Report,
    ) -> None:
        self.done = False
        self._copy = copy
        self._suites = suites
        self._caught = caught
        self._report = report
        self._coverage = _coverage(copy.folder)
        self._coverage.start()
        self._imported: dict[str, frozenset[int]] = {}
        self._progress: Report = lambda *_: None

    def pytest_collection_finish(self) -> None:
        """Remember the lines that ran during the imports."""
        self._imported = _lines_of(self._coverage, self._copy.folder)

    def pytest_runtest_call(self) -> None:
        """Report that the setup of a test is complete."""
        self._progress("calls")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Measure what each test runs, then try each mutant."""
        if session.testsfailed:
            return None
        loaded = Loaded(self._copy.folder / "src")
        items = self._with_shared(session.items)
        gc.collect()
        # Without this, a garbage collection in a forked process would copy the memory of all these objects.
        gc.freeze()
        measured = list(self._measured(items, loaded))
        self._report("note", f"{len(measured)} of {len(session.items)} tests are used")
        known = TestMap(self._copy.folder, measured, self._imported)

        def renew() -> None:
            # Tearing down may fail after a mutant has hung.
            with contextlib.suppress(Exception):
                session._setupstate.teardown_exact(None)
            self._with_shared(items)

        trials = Trials(self._copy, items, known, loaded, renew)
        for suite, mutants in self._suites.items():
            for mutant in mutants:
                verdict = trials.attempt(mutant, caught_by(self._caught, mutant))
                self._report("verdict", suite, verdict)
        self.done = True
        return True

    def _with_shared(self, items: Sequence[pytest.Item]) -> list[pytest.Item]:
        """Set up the shared fixtures, and return the tests whose fixtures could all be set up."""

        def effort(item: pytest.Item) -> tuple[int, int]:
            return len(_fixtures(item, "session")), len(_fixtures(item, *_SHARED))

        first: dict[str, pytest.Item] = {}
        for item in sorted(items, key=effort):
            for name in _fixtures(item, "session"):
                first.setdefault(name, item)
        ready: set[str] = set()
        lacking: set[str] = set()
        for name, item in sorted(first.items(), key=lambda one: effort(one[1])):
            if name in ready or lacking & _fixtures(item, "session"):
                continue
            if _in_time(partial(_set_up, item), _SLOW_FIXTURE):
                _set_up(item)
                ready |= _fixtures(item, "session")
            else:
                lacking |= _fixtures(item, "session") - ready
        if lacking:
            self._report(
                "note",
                f"what needs one of these fixtures is left out: {', '.join(sorted(lacking))}",
            )
        return [item for item in items if not lacking & _fixtures(item, "session")]

    def _measured(self, items: Sequence[pytest.Item], loaded: Loaded) -> Iterator[Measured]:
        """Run every test in forked processes and yield its measurement.

        A test that fails is run once more, because it may depend on the clock.
        """
        failed: list[pytest.Item] = []
        yield from self._measured_once(items, loaded, failed)
        twice: list[pytest.Item] = []
        yield from self._measured_once(failed, loaded, twice)
        for item in twice:
            self._report("note", f"it fails without any mistake, and is left out: {item.nodeid}")

    def _measured_once(
        self, items: Sequence[pytest.Item], loaded: Loaded, failed: list[pytest.Item]
    ) -> Iterator[Measured]:
        """Run tests and yield their measurements.

        A test that is too slow is ended, and the next test runs in a new process.
        """
        left = list(items)
        while left:
            for outcome, measured in self._outcomes(left, loaded):
                item = left.pop(0)
                if measured is not None and outcome == "passed":
                    yield measured
                elif outcome == "failed":
                    failed.append(item)
                elif outcome == "slow set-up":  # other tests would need the same slow fixtures
                    shared = _fixtures(item, *_SHARED)
                    left[:] = [
                        other
                        for other in left
                        if other.path != item.path or not shared & _fixtures(other, *_SHARED)
                    ]

    def _outcomes(
        self, items: Sequence[pytest.Item], loaded: Loaded
    ) -> Iterator[tuple[str, Measured | None]]:
        """Run tests in one process until one is too slow; yield the outcome of each."""
        phase, end, number, count = "", time.monotonic() + _SLOW, 0, len(items)
        with Fork(partial(self._measure, list(items), loaded)) as child:
            while True:
                try:
                    received = child.next(max(0.0, end - time.monotonic()))
                except TimeoutError:
                    received = None
                match received:
                    case ("begins", _):
                        phase, end = " set-up", time.monotonic() + _SLOW
                    case ("calls",):
                        phase = ""
                    case ("measured", outcome, measured):
                        number += 1
                        yield outcome, measured
                    case None:
                        break
        if number < count:
            yield f"slow{phase}", None

    def _measure(self, items: Sequence[pytest.Item], loaded: Loaded, report: Report) -> None:
        folder = self._copy.folder
        coverage = _coverage(folder)
        read: set[str] = set()
        inside = f"{folder}/src/"

        def note(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open" and str(arguments[0]).startswith(inside):
                read.add(os.path.relpath(str(arguments[0]), folder))

        sys.addaudithook(note)
        self._progress = report
        running = run_tests(items, report)
        while True:
            loaded.forget()
            read.clear()
            coverage.start()
            try:
                item, outcome, seconds = next(running)
            except StopIteration:
                return
            lines = _lines_of(coverage, folder)
            report("measured", outcome, Measured(item.nodeid, seconds, lines, frozenset(read)))


def _coverage(folder: Path) -> Coverage:
    coverage = Coverage(data_file=None, include=[f"{folder}/src/*"], config_file=False)
    coverage.set_option("run:disable_warnings", ["no-data-collected", "module-not-measured"])
    return coverage


def _lines_of(coverage: Coverage, folder: Path) -> dict[str, frozenset[int]]:
    """Stop measuring, return the lines that ran in each file, and discard the data."""
    coverage.stop()
    data = coverage.get_data()
    found = {
        os.path.relpath(path, folder): frozenset(data.lines(path) or ())
        for path in data.measured_files()
    }
    coverage.erase()
    return found


def _fixtures(item: pytest.Item, *scopes: str) -> set[str]:
    """Return the names of the fixtures with these scopes that a test needs."""
    info = getattr(item, "_fixtureinfo", None)
    if info is None:
        return set()
    return {
        name for name, found in info.name2fixturedefs.items() if found and found[-1].scope in scopes
    }


def _set_up(item: pytest.Item, report: Report = lambda *_: None) -> None:
    """Set up a test and tear it down, which keeps the shared fixtures; report whether the setup passed."""
    item._initrequest()  # type: ignore[attr-defined] # as pytest does before it runs a test
    ready = call_and_report(item, "setup", log=False).passed
    report(ready)
    call_and_report(item, "teardown", log=False, nextitem=End(item.session))
    item._request = False  # type: ignore[attr-defined] # as pytest does afterwards
    item.funcargs = None  # type: ignore[attr-defined]


def _in_time(function: Callable[[Report], None], seconds: float) -> bool:
    """Run a function in a forked process; return whether it reports success within a time limit."""
    with Fork(function) as child:
        try:
            return child.next(seconds) == (True,)
        except TimeoutError:
            return False

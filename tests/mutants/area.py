"""Loads the tests of some folders, finds out what each of them runs, and tries mutants with them."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from coverage import Coverage
from hypothesis import HealthCheck, Phase, settings

from tests.mutants.changes import Mutant
from tests.mutants.copies import Copy
from tests.mutants.forks import Fork, Report
from tests.mutants.live import Loaded
from tests.mutants.selecting import Measured, TestMap
from tests.mutants.trial import ARGUMENTS, End, Trials, forget_modules, run_tests

__all__ = ["try_mutants"]

_LONG = ("chaos", "soak", "long")
_SLOW = 4.0
"""seconds of a test that is too slow to be of use"""
_SLOW_FIXTURE = 25.0
"""of a set-up that all tests share, such as a session of Spark"""


def try_mutants(
    folder: Path, tests: Sequence[str], suites: Mapping[str, Sequence[Mutant]], output: Path, report: Report
) -> None:
    """Try the mutants of some suites; each verdict is reported. What tests print goes into ``output``."""
    copy = Copy(folder)
    os.chdir(folder)
    paths = [str(folder / "src"), str(folder)]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(written, stream)
    forget_modules()
    # Every run takes the same examples, and the smallest one is not looked for.
    settings.register_profile(
        "mutants", phases=(Phase.explicit, Phase.generate), derandomize=True, database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    settings.load_profile("mutants")
    area = _Area(copy, suites, report)
    code = pytest.main([*ARGUMENTS, *tests], plugins=[area])
    if not area.done:
        report("failed", f"the tests in {', '.join(tests)} could not be run (pytest ended with {code}):", str(output))


class _Area:
    """The plugin that runs in place of the usual loop."""

    def __init__(self, copy: Copy, suites: Mapping[str, Sequence[Mutant]], report: Report) -> None:
        self.done = False
        self._copy = copy
        self._suites = suites
        self._report = report
        self._coverage = _coverage(copy.folder)
        self._coverage.start()
        self._imported: dict[str, frozenset[int]] = {}
        self._progress: Report = lambda *_: None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out what takes long."""
        items[:] = [item for item in items if not any(map(item.get_closest_marker, _LONG))]

    def pytest_collection_finish(self) -> None:
        """Note what ran at import."""
        self._imported = _lines_of(self._coverage, self._copy.folder)

    def pytest_runtest_call(self) -> None:
        """Note that the set-up is done."""
        self._progress("calls")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Find out what each test runs, then try each mutant."""
        if session.testsfailed:
            return None
        loaded = Loaded(self._copy.folder / "src")
        items = self._with_shared(session.items)
        gc.collect()
        gc.freeze()  # so that no process that is forked copies all of it, to look at it
        measured = list(self._measured(items, loaded))
        self._report("note", f"{len(measured)} of {len(session.items)} tests are used")
        known = TestMap(self._copy.folder, measured, self._imported)
        trials = Trials(self._copy, items, known, loaded)
        for suite, mutants in self._suites.items():
            for mutant in mutants:
                self._report("verdict", suite, trials.attempt(mutant))
        self.done = True
        return True

    def _with_shared(self, items: Sequence[pytest.Item]) -> list[pytest.Item]:
        """Set up what all tests share; return the tests that need nothing which could not be set up."""
        first: dict[str, pytest.Item] = {}
        for item in items:
            for name in _fixtures(item, "session"):
                first.setdefault(name, item)
        ready: set[str] = set()
        lacking: set[str] = set()
        for name, item in first.items():
            if name in ready or lacking & _fixtures(item, "session"):
                continue
            if _in_time(partial(_set_up, item), _SLOW_FIXTURE):
                _set_up(item)
                ready |= _fixtures(item, "session")
            else:
                self._report("note", f"{name} is not available in time: {item.nodeid} and others are left out")
                lacking.add(name)
        return [item for item in items if not lacking & _fixtures(item, "session")]

    def _measured(self, items: Sequence[pytest.Item], loaded: Loaded) -> Iterator[Measured]:
        """Run every test in forked processes; those that are too slow end theirs, and the next one goes on."""
        left = list(items)
        while left:
            current, called, end = 0, False, time.monotonic() + _SLOW
            with Fork(partial(self._measure, left, loaded)) as child:
                while True:
                    try:
                        received = child.next(max(0.0, end - time.monotonic()))
                    except TimeoutError:
                        break
                    match received:
                        case ("begins", _):
                            called, end = False, time.monotonic() + _SLOW
                        case ("calls",):
                            called = True
                        case ("measured", found):
                            current += 1
                            if found is not None:
                                yield found
                        case None:
                            break
            slow = left[current : current + 1]
            left = left[current + 1 :]
            if slow and not called:  # what others need as well
                shared = _fixtures(slow[0], "module", "class", "package")
                left = [item for item in left if not shared & _fixtures(item, "module", "class", "package")]

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
                item, passed, seconds = next(running)
            except StopIteration:
                return
            found = None
            lines = _lines_of(coverage, folder)
            if passed:
                found = Measured(item.nodeid, seconds, lines, frozenset(read))
            report("measured", found)


def _coverage(folder: Path) -> Coverage:
    coverage = Coverage(data_file=None, include=[f"{folder}/src/*"], config_file=False)
    coverage.set_option("run:disable_warnings", ["no-data-collected", "module-not-measured"])
    return coverage


def _lines_of(coverage: Coverage, folder: Path) -> dict[str, frozenset[int]]:
    """Stop counting, return the lines that ran by file, and forget them."""
    coverage.stop()
    data = coverage.get_data()
    found = {
        os.path.relpath(path, folder): frozenset(data.lines(path) or ()) for path in data.measured_files()
    }
    coverage.erase()
    return found


def _fixtures(item: pytest.Item, *scopes: str) -> set[str]:
    """Return the fixtures of these scopes that a test needs."""
    info = getattr(item, "_fixtureinfo", None)
    if info is None:
        return set()
    return {name for name, found in info.name2fixturedefs.items() if found and found[-1].scope in scopes}


def _set_up(item: pytest.Item, report: Report = lambda *_: None) -> None:
    """Set a test up and tear it down, which leaves what all tests share."""
    item._initrequest()  # type: ignore[attr-defined]
    try:
        item.ihook.pytest_runtest_setup(item=item)
        report("ready")
    finally:
        item.session._setupstate.teardown_exact(End(item.session))  # type: ignore[arg-type]
        item._request = False  # type: ignore[attr-defined]
        item.funcargs = None  # type: ignore[attr-defined]


def _in_time(function: Callable[[Report], None], seconds: float) -> bool:
    """Try a function in a process of its own; whether it reported anything."""
    with Fork(function) as child:
        try:
            return child.next(seconds) is not None
        except TimeoutError:
            return False

"""Trying mutants: tests are loaded once, and a forked process for each mutant runs the tests of its line."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest
from _pytest.runner import runtestprotocol

from tests.mutants.changes import Mutant
from tests.mutants.copies import Copy
from tests.mutants.forks import Fork, Report
from tests.mutants.live import Loaded
from tests.mutants.selecting import TestMap
from tests.mutants.suites import EVERY_TEST

_OURS = ("tests", "taskqueue_core", "taskqueue_server", "taskqueue_worker", "taskqueue_remote", "taskqueue_cli",
         "taskqueue_conformance", "taskqueue_dispatch", "taskqueue_memory", "taskqueue_prefect", "taskqueue_redis",
         "taskqueue_spark", "pyspark_taskqueue")  # fmt: skip
ARGUMENTS = ("-q", "-s", "-p", "no:cacheprovider", "--no-header", "--tb=short", *EVERY_TEST,
             "-W", "ignore::pytest.PytestAssertRewriteWarning")  # fmt: skip
_IMPORT_SECONDS = 60.0
_MOST_DOUBTFUL = 3
"""tests that fail both with and without a mutation, after which the mutant counts as survived"""


class Verdict(msgspec.Struct, frozen=True):
    """The result of trying a mutant."""

    name: str
    identity: str
    """name without the path of the file, in case the file is renamed"""
    line: int
    outcome: str
    """``killed``, ``hung`` (also caught), ``survived``, or ``uncovered`` if no test runs the line"""
    test: str
    """the first test that failed"""
    tests: int
    """number of tests selected for the mutant"""
    seconds: float

    @property
    def caught(self) -> bool:
        """Whether a test noticed the mutant."""
        return self.outcome in {"killed", "hung"}


class End:
    """A stand-in for the test after the last one, so that pytest keeps the shared fixtures set up."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session

    def listchain(self) -> list[Any]:
        """Return the nodes that pytest must keep set up."""
        return [self._session]


def run_tests(
    items: Sequence[pytest.Item], report: Report, *, last: bool = False
) -> Iterator[tuple[pytest.Item, str, float]]:
    """Run tests in order; yield each with ``passed``, ``skipped`` or ``failed`` and its duration in seconds.

    With ``last``, the shared fixtures are torn down after the last test.
    """
    for n, item in enumerate(items):
        following: Any = items[n + 1] if n + 1 < len(items) else None if last else End(item.session)
        report("begins", item.nodeid)
        began = time.monotonic()
        reports = runtestprotocol(item, log=False, nextitem=following)
        outcomes = {"skipped" if hasattr(one, "wasxfail") else one.outcome for one in reports}
        outcome = next(filter(outcomes.__contains__, ("failed", "skipped")), "passed")
        yield item, outcome, time.monotonic() - began


class Trials:
    """Tries mutants with the tests of one pytest session, in a copy of the project."""

    def __init__(
        self,
        copy: Copy,
        items: Sequence[pytest.Item],
        known: TestMap,
        loaded: Loaded,
        renew: Callable[[], None],
    ) -> None:
        """Store the arguments; ``renew`` sets up the shared fixtures, such as servers, again."""
        self._copy = copy
        self._items = {item.nodeid: item for item in items}
        self._known = known
        self._loaded = loaded
        self._renew = renew

    def attempt(self, mutant: Mutant, earlier: str | None) -> Verdict:
        """Run the tests of a mutant until one fails that passes without the mutation.

        ``earlier`` is the test that failed in an earlier run. It runs first; if no test fails, all others run
        too, however long that takes.
        """
        verdict = self._attempt(mutant, self._known.chosen(mutant, first=earlier))
        if verdict.caught or earlier is None:
            return verdict
        return self._attempt(mutant, self._known.chosen(mutant, every=True))

    def _attempt(self, mutant: Mutant, tests: list[str]) -> Verdict:
        began = time.monotonic()
        number = len(tests)
        outcome, test = ("survived" if tests else "uncovered"), ""
        reimport = self._known.at_import(mutant)
        doubtful = 0
        while tests and doubtful < _MOST_DOUBTFUL:
            outcome, test = self._with(mutant, tests, reimport=reimport)
            if outcome == "not in memory":
                reimport = True
            elif outcome == "survived":
                test = ""
                break
            elif self._passes(test, reimport=reimport):
                break
            else:
                doubtful += 1
                tests.remove(test)
                outcome, test = "survived", ""
        seconds = round(time.monotonic() - began, 2)
        return Verdict(
            mutant.name, mutant.identity, mutant.where.line, outcome, test, number, seconds
        )

    def _with(self, mutant: Mutant, tests: Sequence[str], *, reimport: bool) -> tuple[str, str]:
        with self._copy.changed(mutant.path, mutant.source()):
            return self._outcome(
                partial(_imported_again, tests)
                if reimport
                else partial(self._in_memory, mutant, tests),
                tests,
            )

    def _passes(self, test: str, *, reimport: bool) -> bool:
        """Return whether a test passes without a mutation, if necessary after setting up the shared fixtures again."""
        run = (
            partial(_imported_again, [test]) if reimport else partial(self._in_memory, None, [test])
        )
        if self._outcome(run, [test])[0] == "survived":
            return True
        self._renew()
        return self._outcome(run, [test])[0] == "survived"

    def _outcome(self, run: Callable[[Report], None], tests: Sequence[str]) -> tuple[str, str]:
        """Run tests in a forked process; return the outcome and the test that was running."""
        current, seconds = tests[0], _IMPORT_SECONDS
        with Fork(run) as child:
            while True:
                try:
                    received = child.next(seconds)
                except TimeoutError:
                    return "hung", current
                match received:
                    case ("begins", current):
                        seconds = 3 + 5 * self._known.tests[current].seconds
                    case ("ended", outcome):
                        return outcome, current
                    case None:  # the process died
                        return "killed", current

    def _in_memory(self, mutant: Mutant | None, tests: Sequence[str], report: Report) -> None:
        self._loaded.forget()
        if mutant is not None and mutant.path.endswith(".py"):
            tree = mutant.change()
            assert not isinstance(tree, str)
            if not self._loaded.replace(self._copy.folder / mutant.path, tree):
                report("ended", "not in memory")
                return
        report("ended", _first_outcome([self._items[name] for name in tests], report, last=False))


def _first_outcome(items: Sequence[pytest.Item], report: Report, *, last: bool) -> str:
    for _, outcome, _ in run_tests(items, report, last=last):
        if outcome != "passed":
            return "killed"
    return "survived"


def forget_modules() -> None:
    """Remove all modules of the project from ``sys.modules`` except those of the mutation tool."""
    for name in [one for one in sys.modules if one.split(".")[0] in _OURS]:
        if not name.startswith("tests.mutants"):
            del sys.modules[name]


class _Chosen:
    """A pytest plugin that runs some of the collected tests in a given order."""

    def __init__(self, tests: Sequence[str], report: Report) -> None:
        self._tests = tests
        self._report = report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the chosen tests until one fails, and report the outcome."""
        items = {item.nodeid: item for item in session.items}
        complete = not session.testsfailed and set(self._tests) <= items.keys()
        outcome = "killed"  # applies if a module could not be imported
        if complete:
            outcome = _first_outcome([items[name] for name in self._tests], self._report, last=True)
        self._report("ended", outcome)
        return True


def _imported_again(tests: Sequence[str], report: Report) -> None:
    """Import all modules again, run the tests, and report the outcome."""
    forget_modules()
    if spark := sys.modules.get("pyspark.sql"):
        # The Spark session belongs to the parent process, so this process must not stop it.
        spark.SparkSession.stop = lambda _: None
    files = dict.fromkeys(name.partition("::")[0] for name in tests)
    pytest.main([*ARGUMENTS, *files], plugins=[_Chosen(tests, report)])

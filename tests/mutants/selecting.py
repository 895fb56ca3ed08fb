"""Selecting the tests for a mutant by the lines that each test runs."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import inf
from pathlib import Path
from typing import NamedTuple

from tests.mutants.changes import Mutant, Where

_MOST_TESTS = 40
_MOST_OF_SCRIPT = 200
"""maximum for a Lua script; there are more because it is unknown which of its lines a test runs"""
_MOST_SECONDS = 6.0
"""maximum total seconds of the tests for one mutant, if none fails"""


class Measured(NamedTuple):
    """A test that passes, with its duration and the source lines that it runs."""

    name: str
    seconds: float
    lines: Mapping[str, frozenset[int]]
    """line numbers by file path, relative to the project"""
    files: frozenset[str]
    """other source files that the test read, such as scripts"""


class TestMap:
    """The lines that each test runs, and the lines that run at import."""

    __test__ = False

    def __init__(
        self, root: Path, tests: Iterable[Measured], imported: Mapping[str, frozenset[int]]
    ) -> None:
        self.tests = {test.name: test for test in tests}
        self._root = root
        self._imported = imported
        self._by_line: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for test in self.tests.values():
            for path, lines in test.lines.items():
                for line in lines:
                    self._by_line[path][line].add(test.name)

    def at_import(self, mutant: Mutant) -> bool:
        """Return whether a mutant takes effect at import, so that its module must be imported again."""
        if mutant.path.endswith(".lua"):
            return False
        imported = self._imported.get(mutant.path, frozenset())
        return not mutant.where.in_function or any(
            line in imported for line in _lines(mutant.where)
        )

    def chosen(self, mutant: Mutant, *, first: str | None = None, every: bool = False) -> list[str]:
        """Return the tests that may notice a mutant, fastest first; an empty list if no test runs its line.

        ``first`` is a test to run before the others, if it is among them. With ``every``, no test is left out
        to save time.
        """
        groups = self._groups(mutant)
        most = _MOST_OF_SCRIPT if mutant.path.endswith(".lua") else _MOST_TESTS
        chosen = self._ordered(groups, *((sys.maxsize, inf) if every else (most, _MOST_SECONDS)))
        if any(first in group for group in groups):
            chosen = [name for name in (first, *chosen) if name is not None]
        return list(dict.fromkeys(chosen))

    def _groups(self, mutant: Mutant) -> list[set[str]]:
        """Return groups of tests that may notice a mutant, most likely group first."""
        if mutant.path.endswith(".lua"):
            return [{name for name, test in self.tests.items() if mutant.path in test.files}]
        direct = self._running(mutant.path, _lines(mutant.where))
        if not self.at_import(mutant):
            return [direct]
        named = {path: self._lines_with(path, mutant.where.names) for path in self._by_line}
        same = self._running(mutant.path, named.pop(mutant.path, ()))
        others = [self._running(path, lines) for path, lines in named.items()]
        anything = self._running(mutant.path, self._by_line[mutant.path])
        return [direct | same, set[str]().union(*others), anything]

    def _running(self, path: str, lines: Iterable[int]) -> set[str]:
        by_line = self._by_line.get(path, {})
        return {name for line in lines for name in by_line.get(line, ())}

    def _lines_with(self, path: str, names: Iterable[str]) -> list[int]:
        """Return the numbers of the lines of a file that contain one of these names."""
        words = "|".join(map(re.escape, names))
        if not words:
            return []
        pattern = re.compile(rf"\b({words})\b")
        text = (self._root / path).read_text().split("\n")
        return [n for n, line in enumerate(text, 1) if pattern.search(line)]

    def _ordered(self, groups: list[set[str]], most: int, most_seconds: float) -> list[str]:
        """Return tests from the groups in turn, up to the maximum number and total duration.

        Of a parametrized test, the second case comes only after the first cases of all other tests in its
        group.
        """
        found: dict[str, float] = {}
        for group in groups:
            often: dict[str, int] = defaultdict(int)
            ranked = []
            for name in sorted(group - found.keys(), key=lambda name: self.tests[name].seconds):
                function = name.partition("[")[0]
                ranked.append((often[function], self.tests[name].seconds, name))
                often[function] += 1
            found |= {name: seconds for _, seconds, name in sorted(ranked)}
        chosen: list[str] = []
        total = 0.0
        for name, seconds in found.items():
            if len(chosen) == most:
                break
            if not chosen or total + seconds <= most_seconds:
                chosen.append(name)
                total += seconds
        return chosen


def _lines(where: Where) -> set[int]:
    """Return the changed lines and those of the enclosing statement, because Python traces only some of them."""
    first, last = where.span
    start, end = where.statement
    return {*range(first, last + 1), *range(start, end + 1)}

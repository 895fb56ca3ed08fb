"""Mutation runs: sampling mutants, selecting tests, comparing two runs, and continuing a run."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

from tests.mutants.branches import Branches
from tests.mutants.changes import Mutant, mutants_of
from tests.mutants.live import Loaded
from tests.mutants.selecting import Measured, TestMap
from tests.mutants.suites import sample_of
from tests.mutants.trial import Verdict
from tests.mutants.verdicts import Run, caught_in, compare

_SOURCE = """
from functools import cache

LIMIT = 3

@cache
def more(n: int) -> int:
    return n + LIMIT

class Box:
    size = 1
    def grow(self) -> int:
        return (lambda by: self.size + by)(2)
"""


def _mutants(folder: Path, name: str = "one.py", source: str = _SOURCE) -> list[Mutant]:
    (folder / name).write_text(source)
    return mutants_of(folder, name)


def _named(mutants: list[Mutant], text: str) -> Mutant:
    (found,) = [mutant for mutant in mutants if text in mutant.name]
    return found


def test_a_sample_depends_on_its_sources_alone(tmp_path: Path) -> None:
    """Fault M5: the sample stays the same if another file grows or if the mutated file is renamed."""
    lines = "\n".join(f"def f{n}(): return {n} + f" for n in range(60))
    mutants = _mutants(tmp_path, source=lines)
    others = _mutants(tmp_path, "two.py", lines.replace("def f", "def other"))
    chosen = [one.identity for one in sample_of(mutants, 30, 1)]
    assert len(chosen) == 30
    assert [one.identity for one in sample_of(mutants, 30, 2)] != chosen
    renamed = _mutants(tmp_path, "renamed.py", lines)
    assert [one.identity for one in sample_of(renamed, 30, 1)] == chosen
    both = {one.identity for one in sample_of([*others, *mutants], 60, 1)}
    same = {one.identity for one in mutants if one.identity in both}
    assert same == {one.identity for one in sample_of(mutants, len(same), 1)}


def test_code_is_replaced_in_memory(tmp_path: Path) -> None:
    """Replacing code in memory affects functions, methods and lambdas, but not what ran at import."""
    mutants = _mutants(tmp_path)
    path = tmp_path / "one.py"
    spec = importlib.util.spec_from_file_location("one", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    loaded = Loaded(tmp_path)

    def replace(text: str) -> bool:
        tree = _named(mutants, text).change()
        assert isinstance(tree, ast.Module)
        loaded.forget()
        return loaded.replace(path, tree)

    assert (module.more(1), module.Box().grow()) == (4, 3)
    assert not replace("constant: 3 -> 4")
    assert replace("n + LIMIT -> n - LIMIT")
    assert (module.more(1), module.Box().grow()) == (-2, 3)
    assert replace("self.size + by -> self.size - by")
    assert (module.more(1), module.Box().grow()) == (4, -1)


def test_tests_are_chosen_by_what_they_run(tmp_path: Path) -> None:
    """The tests that run the changed line are chosen, fastest first, each parametrized test with one case first.

    For code that runs at import, tests that use the defined names are chosen.
    """
    mutants = _mutants(tmp_path)

    def measured(name: str, seconds: float, *lines: int) -> Measured:
        return Measured(name, seconds, {"one.py": frozenset(lines)}, frozenset({"a.lua"}))

    tests = [
        measured("t.py::slow", 2.0, 8),
        measured("t.py::all[1]", 0.1, 8),
        measured("t.py::all[2]", 0.2, 8),
        measured("t.py::other", 0.5, 13),
        measured("t.py::far too slow", 9.0, 8),
    ]
    known = TestMap(tmp_path, tests, {"one.py": frozenset({2, 4, 6, 7, 10, 11, 12})})
    line = _named(mutants, "n + LIMIT -> n - LIMIT")
    assert known.chosen(line) == ["t.py::all[1]", "t.py::slow", "t.py::all[2]"]
    assert known.chosen(line, first="t.py::slow")[0] == "t.py::slow"
    assert known.chosen(line, first="t.py::other")[0] == "t.py::all[1]"
    assert "t.py::far too slow" in known.chosen(line, every=True)
    assert not known.at_import(line)
    constant = _named(mutants, "constant: 3 -> 4")
    assert known.at_import(constant)
    assert known.chosen(constant)[:2] == ["t.py::all[1]", "t.py::slow"]
    assert known.chosen(_named(mutants, "constant: 1 -> 2"))[0] == "t.py::other"
    assert known.chosen(_named(mutants, "constant: 2 -> 3")) == ["t.py::other"]
    (script,) = _mutants(tmp_path, "a.lua", "local a = b == c\n")
    assert len(known.chosen(script)) == 4
    (unread,) = _mutants(tmp_path, "b.lua", "local a = b == c\n")
    assert known.chosen(unread) == []


def _verdict(path: str, text: str, outcome: str) -> Verdict:
    return Verdict(f"{path}: {text}", f"f: {text}", 1, outcome, "t.py::one", 1, 0.1)


def test_two_runs_are_compared(tmp_path: Path) -> None:
    """Fault M5: a comparison fails if an area catches fewer mutants or branches, and names each one lost."""
    paths = before, after = tmp_path / "before.json", tmp_path / "after.json"
    outcomes = [("killed", "hung", "survived"), ("killed", "survived", "killed")]
    for path, (first, second, third) in zip(paths, outcomes, strict=True):
        run = Run(path, 3, 1)
        run.add("memory", _verdict("a.py", "x -> y", first))
        run.add("memory", _verdict("a.py" if path is before else "b.py", "y -> z", second))
        run.add("memory", _verdict("a.py", "z -> x", third))
        run.cover({"memory": {"a.py": Branches(10, [(1, 2)])}})
    said: list[str] = []
    assert compare(before, after, said.append) == 0
    assert "| memory | 2 / 3 | 2 / 3 | 2 of 3 | 2 |" in said
    assert [line for line in said if "b.py: y -> z" in line]
    assert compare(before, before, said.append) == 0
    Run(after, 3, 1).cover({"memory": {"a.py": Branches(10, [(1, 2), (5, 6)])}})
    assert compare(before, after, said.append) == 1
    assert "branches of memory: 9 of 10 before, 8 of 10 after" in said
    assert said[-1] == "taken before and not after: a.py, from line 5 to 6"
    Run(after, 3, 2).add("memory", _verdict("a.py", "x -> y", "killed"))
    assert compare(before, after, said.append) == 1
    assert "cannot be compared" in said[-1]


def test_a_run_goes_on_from_its_file(tmp_path: Path) -> None:
    """A mutant with a verdict is not tried again, unless the sources or tests have changed."""
    path = tmp_path / "run.json"
    mutants = _mutants(tmp_path)
    first = Run(path, 3, 1)
    assert first.left("memory", "sources", mutants, {}) == mutants
    first.add("memory", _verdict("one.py", mutants[0].name.partition(": ")[2], "killed"))
    assert Run(path, 3, 1).left("memory", "sources", mutants, {}) == mutants[1:]
    assert Run(path, 3, 1).left("memory", "changed sources", mutants, {}) == mutants
    first.add("memory", _verdict("one.py", mutants[1].name.partition(": ")[2], "survived"))
    assert Run(path, 3, 1).left("memory", "sources", mutants, {}) == mutants[2:]
    missed = {mutants[1].name: "t.py::one"}
    assert Run(path, 3, 1).left("memory", "sources", mutants, missed) == mutants[1:]
    assert list(caught_in(path)) == ["f: " + mutants[0].name.partition(": ")[2]]
    assert Run(path, 3, 2).left("memory", "sources", mutants, {}) == mutants

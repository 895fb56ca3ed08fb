"""Generating mutants, and twelve mutants of different kinds that fast tests must notice."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from tests.mutants.__main__ import accepted
from tests.mutants.changes import mutants_of
from tests.mutants.copies import ROOT
from tests.mutants.suites import SUITES


def test_a_dozen_mutants_are_killed() -> None:
    """Fault M5: fast tests notice all twelve quick mutants, which are of different kinds and in two files."""
    command = [sys.executable, "-m", "tests.mutants", "--quick"]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240
    )
    assert ended.stdout.splitlines()[-1:] == ["12 of 12 killed"], ended.stdout + ended.stderr


def test_what_is_accepted_exists_and_is_explained() -> None:
    """Each mutant accepted as harmless still exists and has a reason."""
    paths = {path for suite in SUITES.values() for path in suite.paths(ROOT)}
    known = {name.partition(": ")[0] for name in accepted()} & paths
    every = {one.name for path in known for one in mutants_of(ROOT, path)}
    for name, why in accepted().items():
        assert name in every, f"no longer a mutant: {name}"
        assert len(why) > 15


_SOURCE = '''
"""Says."""
def grow(limit: int = 1) -> int:
    """Grow."""
    if limit > 3 and not limit == 5:
        save(limit)
    self.size += limit
    return limit - 1
'''


def test_every_kind_of_change_is_made(tmp_path: Path) -> None:
    """Comparisons, booleans, constants, arithmetic, returns and statements are mutated; docstrings are not."""
    (tmp_path / "grown.py").write_text(_SOURCE)
    found = mutants_of(tmp_path, "grown.py")
    changes = {(one.kind, one.before, one.after) for one in found}
    assert {
        ("comparison", "limit > 3", "limit >= 3"),
        ("comparison", "limit == 5", "limit != 5"),
        ("boolean", "limit > 3 and (not limit == 5)", "limit > 3 or not limit == 5"),
        ("boolean", "not limit == 5", "limit == 5"),
        ("constant", "3", "4"),
        ("constant", "5", "6"),
        ("statement", "save(limit)", "pass"),
        ("arithmetic", "self.size += limit", "self.size -= limit"),
        ("arithmetic", "limit - 1", "limit + 1"),
        ("return", "return limit - 1", "return None"),
    } <= changes
    plain = ast.unparse(ast.parse(_SOURCE))
    assert all(one.source() != plain for one in found)
    assert len({one.name for one in found}) == len(found)


def test_scripts_are_changed_line_by_line(tmp_path: Path) -> None:
    """Lua code is mutated, Lua comments are not."""
    (tmp_path / "one.lua").write_text(
        "-- a == b\nlocal a = b == c and not d -- x < y\nadd(q, 'n', a + 1)\n"
    )
    changes = {(one.where.line, one.kind, one.after) for one in mutants_of(tmp_path, "one.lua")}
    assert changes == {
        (2, "comparison", "local a = b ~= c and not d"),
        (2, "boolean", "local a = b == c or not d"),
        (2, "boolean", "local a = b == c and d"),
        (3, "arithmetic", "add(q, 'n', a - 1)"),
        (3, "statement", ""),
    }

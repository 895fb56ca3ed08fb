"""How many branches of each area its tests take, also in the processes that they start."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from tests.mutants.copies import ROOT
from tests.mutants.suites import Suite

__all__ = ["measure"]

_SETTINGS = """
[run]
branch = true
parallel = true
patch = subprocess
source = {root}/src
data_file = {folder}/coverage
disable_warnings = no-data-collected, module-not-measured, module-not-imported, couldnt-parse
[report]
ignore_errors = true
"""


class _Summary(msgspec.Struct):
    num_branches: int
    covered_branches: int


class _File(msgspec.Struct):
    summary: _Summary


class _Report(msgspec.Struct):
    files: dict[str, _File]


def measure(
    suites: Mapping[str, Suite], processes: int, say: Callable[[str], None]
) -> dict[str, tuple[int, int]]:
    """Run the tests of some suites; return how many branches of its files are taken, and how many there are.

    A test that fails is printed, and what it took counts. A process that is killed takes its counts with it.
    """
    folders = dict.fromkeys(folder for suite in suites.values() for folder in suite.tests)
    with tempfile.TemporaryDirectory(prefix="taskqueue-branches-") as folder:
        settings = Path(folder, "settings")
        settings.write_text(_SETTINGS.format(root=ROOT, folder=folder))
        several = ["--numprocesses", str(processes), "--dist", "worksteal"] if processes > 1 else []
        code = _coverage(settings, "run", "-m", "pytest", "-q", *several, *folders)
        if code:
            say(f"the tests ended with {code}, as shown above")
        _coverage(settings, "combine", "-q")
        _coverage(settings, "json", "-q", "-o", f"{folder}/report.json")
        report = msgspec.json.decode(Path(folder, "report.json").read_bytes(), type=_Report)
    return {name: _sum(report, suite.paths(ROOT)) for name, suite in suites.items()}


def _coverage(settings: Path, command: str, *arguments: str) -> int:
    words = [sys.executable, "-m", "coverage", command, f"--rcfile={settings}", *arguments]
    return subprocess.run(words, cwd=ROOT, check=False).returncode


def _sum(report: _Report, paths: Iterable[str]) -> tuple[int, int]:
    found = [report.files[path].summary for path in paths if path in report.files]
    return sum(one.covered_branches for one in found), sum(one.num_branches for one in found)

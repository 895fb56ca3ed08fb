"""Branch coverage of each area by its tests, including the processes that they start."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from tests.mutants.copies import ROOT
from tests.mutants.suites import EVERY_TEST, Suite

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


class _File(msgspec.Struct):
    summary: _Summary
    missing_branches: list[tuple[int, int]]


class _Report(msgspec.Struct):
    files: dict[str, _File]


class Branches(msgspec.Struct):
    """Branch coverage of a file."""

    all: int
    missing: list[tuple[int, int]]
    """branches never taken, each as a pair of line numbers: from and to"""


def measure(
    suites: Mapping[str, Suite], processes: int, say: Callable[[str], None], *, everything: bool
) -> dict[str, dict[str, Branches]]:
    """Run the tests of some suites, or all tests; return the branch coverage by suite and file.

    A failed test is printed, and its coverage counts. The coverage of a process that is killed is lost.
    """
    folders = dict.fromkeys(folder for suite in suites.values() for folder in suite.tests)
    tests = ["tests"] if everything else list(folders)
    with tempfile.TemporaryDirectory(prefix="taskqueue-branches-") as folder:
        settings = Path(folder, "settings")
        settings.write_text(_SETTINGS.format(root=ROOT, folder=folder))
        several = ["--numprocesses", str(processes), "--dist", "worksteal"] if processes > 1 else []
        code = _coverage(settings, "run", "-m", "pytest", "-q", *EVERY_TEST, *several, *tests)
        if code:
            say(f"the tests ended with {code}, as shown above")
        _coverage(settings, "combine", "-q")
        _coverage(settings, "json", "-q", "-o", f"{folder}/report.json")
        report = msgspec.json.decode(Path(folder, "report.json").read_bytes(), type=_Report)
    files = {
        path: Branches(found.summary.num_branches, found.missing_branches)
        for path, found in report.files.items()
    }
    areas = {
        name: {path: files[path] for path in suite.paths(ROOT) if path in files}
        for name, suite in suites.items()
    }
    if everything:
        known = {path for area in areas.values() for path in area}
        areas["other sources"] = {path: one for path, one in files.items() if path not in known}
    return areas


def _coverage(settings: Path, command: str, *arguments: str) -> int:
    words = [sys.executable, "-m", "coverage", command, f"--rcfile={settings}", *arguments]
    return subprocess.run(words, cwd=ROOT, check=False).returncode

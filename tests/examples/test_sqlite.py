"""The SQLite example backend, installed into a separate environment as users install it."""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "taskqueue_sqlite"
LINES = 400
EXAMPLES = os.environ.get("TASKQUEUE_KIT_EXAMPLES", "8")
"""number of random histories that the conformance kit plays; `dev.py soak` sets a higher one"""
MANY = "60"
MEMORY = Path("/dev/shm")  # noqa: S108 - the test creates its own folder in it


class Environment:
    """A virtual environment that uses the libraries of the current one and has the example installed."""

    def __init__(self, folder: Path) -> None:
        self._python = folder / "env" / "bin" / "python"
        self._work = folder / "work"
        self._work.mkdir()
        self._run(sys.executable, "-m", "venv", "--without-pip", str(folder / "env"))
        (site,) = (folder / "env").glob("lib/python*/site-packages")
        (site / "libraries.pth").write_text(
            f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        )
        self.python(
            "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
            "--disable-pip-version-check", str(EXAMPLE),
        )  # fmt: skip

    def python(self, *arguments: str, **variables: str) -> str:
        """Run the Python of this environment in an empty folder and return its output."""
        return self._run(str(self._python), *arguments, **variables)

    def tests(self, *more: str, examples: str = EXAMPLES) -> str:
        """Run the tests of the example and return their output."""
        return self.python(
            *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:schemathesis"),
            *("--basetemp=tests", str(EXAMPLE / "tests"), *more),
            TASKQUEUE_KIT_EXAMPLES=examples,
        )

    def _run(self, *command: str, **variables: str) -> str:
        environment = {**os.environ, "HOME": str(self._work), **variables}
        environment.pop("VIRTUAL_ENV", None)
        done = subprocess.run(
            command,
            cwd=self._work,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout


@pytest.fixture(scope="module")
def installed() -> Iterator[Environment]:
    """One installation for all tests.

    It is in memory if possible, because a disk takes long to sync each step of the store.
    """
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        yield Environment(Path(folder))


def test_it_is_small() -> None:
    """G6: a complete durable backend has fewer than 400 lines, including docstrings, comments and blank lines."""
    files = (EXAMPLE / "src").rglob("*.py")
    assert 0 < sum(len(file.read_text().splitlines()) for file in files) < LINES


def test_it_passes_the_kit(installed: Environment) -> None:
    """G6: the example passes the conformance kit when it is installed as a package."""
    report = installed.tests()
    assert " passed" in report
    assert "skipped" not in report


@pytest.mark.long
def test_it_passes_many_histories(installed: Environment) -> None:
    """G6: the example passes the conformance kit with a larger number of random histories."""
    assert "1 passed" in installed.tests("-k", "test_machine", examples=MANY)


def test_it_has_a_name(installed: Environment) -> None:
    """G3: once the example is installed, it can be configured by its name."""
    script = "from taskqueue_core.loading import load_backend; print(type(load_backend('sqlite')).__name__)"
    assert "SQLite" in installed.python("-c", script)


def test_it_runs_the_main_job(installed: Environment, tmp_path: Path) -> None:
    """G3, G6: the demonstration runs on the example: every task is accounted for, and every result is right."""
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"line {number}\n" * (number + 1))
    printed = installed.python(
        "-m", "taskqueue_cli", "demo", str(tmp_path), "--backend", "taskqueue_sqlite", "--json"
    )
    summary = json.loads(printed)
    assert summary["ok"], summary["checks"]
    assert summary["ledger"]["balanced"]
    assert (summary["mismatches"], summary["files"]) == (0, 40)

"""Tries mutants: each is put into a copy of the project, and its tests run there in a process of their own."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import Phase, settings

from tests.mutants.changes import Mutant

__all__ = ["ROOT", "Copy", "Verdict"]

ROOT = Path(__file__).parents[2]
_COPIED = ("src", "tests", "docs", "examples", "tools", "pyproject.toml", "README.md")
_LOADED = (
    "hiredis", "httpx2", "hypothesis.stateful", "jinja2", "prometheus_client", "pydantic_settings",
    "pytest_asyncio.plugin", "schemathesis.pytest.plugin", "starlette.applications", "structlog",
    "uvicorn.server", "websockets.asyncio.client", "websockets.asyncio.server",
)  # fmt: skip
"""loaded once, for every process that is forked"""
_OUTPUT = "output.txt"
_PATIENCE = 40
"""seconds of one test, several times what the slowest takes"""
_OURS = ("tests", "taskqueue_core", "taskqueue_memory", "taskqueue_redis")


class Verdict(msgspec.Struct, frozen=True):
    """What came of a mutant."""

    name: str
    line: int
    outcome: str
    """``killed``, ``hung`` (which is as good) or ``survived``"""
    seconds: float

    @property
    def killed(self) -> bool:
        """Whether a test noticed."""
        return self.outcome != "survived"


class Copy:
    """A copy of the project's files in a folder; the files themselves are never touched."""

    def __init__(self, folder: Path, root: Path = ROOT) -> None:
        self.folder = folder
        self._second = 0
        for name in _LOADED:
            importlib.import_module(name)
        ignore = shutil.ignore_patterns("__pycache__", "results", "*.pyc")
        for name in _COPIED:
            if (root / name).is_dir():
                shutil.copytree(root / name, folder / name, ignore=ignore)
            elif (root / name).exists():
                shutil.copy(root / name, folder / name)

    @contextlib.contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        """Have the mistake in the copy for a while."""
        path = self.folder / mutant.path
        before, since = path.read_text(), path.stat()
        path.write_text(mutant.make())
        # Bytecode is known by its source's size and full second: each mutant has one of its own.
        self._second += 1
        os.utime(path, (self._second, self._second))
        try:
            yield
        finally:
            path.write_text(before)
            os.utime(path, ns=(since.st_atime_ns, since.st_mtime_ns))

    def attempt(self, mutant: Mutant, tests: Sequence[str], seconds: float) -> Verdict:
        """Run tests with a mistake in the copy."""
        began = time.monotonic()
        with self.mutated(mutant):
            code = self.run(tests, seconds)
        outcome = "hung" if code is None else "survived" if code == 0 else "killed"
        return Verdict(mutant.name, mutant.line, outcome, round(time.monotonic() - began, 2))

    def run(self, tests: Sequence[str], seconds: float) -> int | None:
        """Run tests in the copy; the exit code, or None if they had to be killed, or died."""
        child = os.fork()
        if not child:
            code = 99
            try:
                code = self._be_pytest(tests)
            except BaseException:  # noqa: BLE001 - it is in the output of this process, which ends here
                traceback.print_exc(file=sys.stdout)
            finally:
                sys.stdout.flush()
                os._exit(code)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            gone, status = os.waitpid(child, os.WNOHANG)
            if gone and os.WIFSIGNALED(status):
                break
            if gone:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # and what it started
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)
        return None

    def output(self) -> str:
        """Return what the last tests printed."""
        return (self.folder / _OUTPUT).read_text()

    def _be_pytest(self, tests: Sequence[str]) -> int:
        os.setsid()
        os.chdir(self.folder)
        output = os.open(self.folder / _OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.dont_write_bytecode = (
            False  # what is in the copy is compiled once, not for every mutant
        )
        sys.pycache_prefix = None
        paths = [str(self.folder / "src"), str(self.folder)]
        sys.path[:0] = paths
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        for name in [one for one in sys.modules if one.split(".")[0] in _OURS]:
            del sys.modules[name]
        # Who wants to know whether a test fails needs no smallest example, nor one that another mutant left behind.
        settings.register_profile("mutants", phases=(Phase.explicit, Phase.generate))
        settings.load_profile("mutants")
        words = ["-q", "-x", "-p", "no:cacheprovider", "--no-header", "--tb=line"]
        words += ["-W", "ignore::pytest.PytestAssertRewriteWarning", *tests]
        return int(pytest.main(words, plugins=[_Patience()]))


class _Patience:
    """Ends the process with a test that runs on and on: waiting for all the others' time would take minutes."""

    def pytest_runtest_logstart(self) -> None:
        """Begin to wait."""
        signal.alarm(_PATIENCE)

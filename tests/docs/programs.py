"""Helpers for tests of documentation pages: extract code blocks and run programs as a page shows them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from taskqueue_redis.embedded.watchdog import Watchdog

PATIENCE = 60.0
"""seconds after which a hanging program is killed"""


def blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def run(*words: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Run a program and return what it prints; it must exit with 0, and close what it opens."""
    done = subprocess.run(
        words,
        cwd=cwd,
        env=_strict(env),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ResourceWarning" not in done.stderr, done.stderr
    return done.stdout


def python(code: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Run Python code and return what it prints; it must exit with 0 and print nothing on stderr."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd, env=_strict(env), capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def _strict(env: Mapping[str, str] | None) -> dict[str, str]:
    """Return an environment in which Python warns of what is never closed, as ``python -X dev`` does."""
    return {**(os.environ if env is None else env), "PYTHONWARNINGS": "always::ResourceWarning"}


@contextmanager
def background(words: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a program in the background.

    It ends with the block at the latest, and also if the test run is killed.
    """
    with (
        closing(Watchdog("KILL")) as watchdog,
        subprocess.Popen(words, stdout=subprocess.PIPE, text=True, **options) as started,
    ):
        watchdog.watch(started.pid)
        try:
            yield started
            started.terminate()
            started.communicate(timeout=PATIENCE)
        finally:
            started.kill()

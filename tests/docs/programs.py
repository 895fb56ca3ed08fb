"""What tests of pages share: the blocks of a page, and programs that run as the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from taskqueue_redis.embedded.watchdog import Watchdog

PATIENCE = 60.0
"""seconds that end a program that hangs"""


def blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def run(*words: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Run a program, which must succeed; return what it prints."""
    done = subprocess.run(
        words, cwd=cwd, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python(code: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Run Python code, which must succeed and complain of nothing; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@contextmanager
def background(words: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a program whose output is read. It ends with the block at the latest, or if the tests are killed."""
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

"""Commands in processes of their own."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]


@contextmanager
def process(*words: str, stderr: int | None = subprocess.PIPE) -> Iterator[subprocess.Popen[bytes]]:
    """A command, as users start it for programs, which is killed if the test did not end it."""
    with subprocess.Popen(
        [sys.executable, "-m", "taskqueue_core.cli", *words, "--json", "--log-level", "error"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=stderr,
        start_new_session=True,
    ) as started:
        try:
            yield started
        finally:
            started.kill()

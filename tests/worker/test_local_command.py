"""Local workers as processes: ``taskqueue worker --local``, and the program on the page about workers."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "workers.md"


@pytest.mark.parametrize("words", [["--local"], ["--backend", "memory"]])
def test_a_local_worker_ends_well_at_a_signal(words: list[str]) -> None:
    """G5: the same module of handlers works with a server or without one."""
    command = [sys.executable, "-m", "taskqueue_core.cli", "worker", "tests.cli.work:worker"]
    with subprocess.Popen([*command, *words], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert b"working for double, who" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        # The latter where it had not begun to serve.
        assert process.wait(20) in {0, -signal.SIGTERM}


def test_the_page_about_workers() -> None:
    """G6: its program runs as it is, a batch handler included."""
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
    assert done.stdout == "Hello Ada 4\n"

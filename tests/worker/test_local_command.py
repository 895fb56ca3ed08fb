"""Local workers as processes: ``taskqueue worker --backend``, and the program on the page about workers."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.cli.processes import process
from tests.docs.programs import blocks, python

PAGE = Path(__file__).parents[2] / "docs" / "workers.md"


def test_a_local_worker_ends_well_at_a_signal() -> None:
    """G5: the same module of handlers also runs without a server, and SIGTERM ends the process with 0."""
    words = ("worker", "tests.cli.work:worker", "--backend", "tests.cli.work:Telling")
    with process(*words, stderr=None) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"subscribed\n"
        assert b"double" in worker.stdout.readline()
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0


def test_the_page_about_workers() -> None:
    """G6, U9: the programs on the page run unchanged, with batches, a state, dependencies and middleware."""
    outputs = [python(program) for program in blocks(PAGE.read_text(), "python")]
    assert outputs == [
        "Hello Ada 4\n",
        "open\n3\nclose\n",
        "attempt 1 is committed: {17: 'paid'}\npaid\nthe worker ends\n",
        "trace 17 starts\nit ends\nsmall cat.png\n",
        "started (task -)\n",
    ]

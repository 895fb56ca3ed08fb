"""The worker of the demonstration: ``taskqueue worker taskqueue_cli.demo.job:worker``."""

from __future__ import annotations

import os

from taskqueue_cli.demo.measure import Measured, measure
from taskqueue_worker import Context, Worker

__all__ = ["KEY", "KEY_VARIABLE", "digest", "worker"]

KEY_VARIABLE = "TASKQUEUE_DEMO_KEY"
KEY = os.environ.get(KEY_VARIABLE, "digest")
"""each run has a key of its own, since a shared store remembers the runs before"""

worker = Worker(concurrency=4, prefetch=8, grace=2.0)


@worker.task(KEY)
def digest(
    path: str, context: Context, *, fails_first: bool = False, poison: bool = False
) -> Measured:
    """Measure one file. Some tasks fail on purpose: once, or always."""
    if poison:
        raise RuntimeError("poison: this task can never succeed")
    if fails_first and context.attempt == 1:
        raise ConnectionError("a failure on purpose, on the first attempt only")
    return measure(path)

"""The pytest plugin: fixtures for tests of an application's tasks.

pytest imports this module in every run, so it imports the worker only when a test needs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from taskqueue_core import Tasks
    from taskqueue_worker.testing import TestQueue


@pytest.fixture
def taskqueue(tasks: Tasks) -> Iterator[TestQueue]:
    """Return an open `TestQueue` of the registry that the fixture ``tasks`` of your project returns."""
    from taskqueue_worker.testing import TestQueue  # noqa: PLC0415 - see above

    with TestQueue(tasks) as queue:
        yield queue


@pytest.fixture
def taskqueue_inline(tasks: Tasks) -> Iterator[TestQueue]:
    """Return an open `TestQueue` in which each publish runs its tasks, as ``mode="inline"`` does."""
    from taskqueue_worker.testing import TestQueue  # noqa: PLC0415 - see above

    with TestQueue(tasks, mode="inline") as queue:
        yield queue

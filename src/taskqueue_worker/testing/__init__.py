"""Testing an application's tasks: ``from taskqueue_worker.testing import TestQueue``."""

from taskqueue_worker.testing.drained import Drained, NotDrained, NotIdle, Run
from taskqueue_worker.testing.published import PublishedTask
from taskqueue_worker.testing.queue import TestQueue

__all__ = ["Drained", "NotDrained", "NotIdle", "PublishedTask", "Run", "TestQueue"]

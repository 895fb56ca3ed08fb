"""A worker and a server that is older than the worker."""

from __future__ import annotations

import logging

import pytest

from taskqueue_core.protocol.frames import FEATURES, RetryFrame
from taskqueue_worker import Snooze, Worker
from tests.worker.fake import FakeServer, running, work


@pytest.mark.parametrize("features", [[], ["snooze", "later"]], ids=["old", "new"])
async def test_a_snooze_of_a_new_worker(
    server: FakeServer, features: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A server without the feature ``snooze`` gets a plain retry with the delay, and the worker warns once (U5)."""
    worker = Worker(url=server.url)

    @worker.task("work")
    async def handle() -> None:
        raise Snooze(2.5)

    caplog.set_level(logging.WARNING, "taskqueue.worker")
    async with running(worker):
        peer = await server.accept()
        assert peer.hello.features == list(FEATURES)
        await peer.welcome(features=features)
        for receipt in ("r1", "r2"):
            await peer.deliver(work({}, receipt=receipt))
            frame = await peer.next(RetryFrame)
            assert (frame.receipt, frame.delay, frame.free) == (receipt, 2.5, bool(features))
    warnings = [record for record in caplog.records if "snooze" in record.getMessage()]
    assert len(warnings) == (0 if features else 1)

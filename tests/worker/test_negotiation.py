"""A worker and a server that is older than the worker."""

from __future__ import annotations

import logging

import pytest

from taskqueue_core.protocol.frames import FEATURES, DeadLetterFrame, RetryFrame
from taskqueue_worker import Reject, Snooze, Worker
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


@pytest.mark.parametrize("features", [[], ["tracebacks"]], ids=["old", "new"])
async def test_tracebacks_of_a_new_worker(server: FakeServer, features: list[str]) -> None:
    """A server without the feature ``tracebacks`` gets frames without them (U10)."""
    worker = Worker(url=server.url)

    @worker.task("work")
    async def handle(number: int) -> None:
        error = ValueError(f"number {number}")
        if number:
            raise error
        raise Reject("zero") from error

    async with running(worker):
        peer = await server.accept()
        await peer.welcome(features=features)
        await peer.deliver(work({"number": 1}), work({"number": 0}))
        retry, dead = await peer.next(RetryFrame), await peer.next(DeadLetterFrame)
    assert (retry.error, dead.reason) == ("ValueError: number 1", "zero")
    if features:
        assert retry.traceback is not None
        assert retry.traceback.endswith("ValueError: number 1\n")
        assert "ValueError: number 0" in (dead.traceback or "")
    else:
        assert (retry.traceback, dead.traceback) == (None, None)

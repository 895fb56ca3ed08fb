"""Quarantine: a worker whose tasks all fail stops receiving tasks for a while, and finally ends."""

from __future__ import annotations

import logging
import threading

import pytest

from taskqueue_core.protocol.frames import (
    AckFrame,
    Bye,
    Credit,
    DeadLetterFrame,
    RedeliverFrame,
    RetryFrame,
)
from taskqueue_worker import Quarantine, Reject, Worker, WorkerQuarantined
from taskqueue_worker import Retry as Again
from taskqueue_worker.quarantine import QuarantinePhase
from tests.worker.fake import FakeServer, outcome, running, work
from tests.worker.local import until


class Clock:
    """A clock that the test controls."""

    def __init__(self) -> None:
        """The clock starts at 0."""
        self.now = 0.0

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now


def failing(quarantine: Quarantine, times: int) -> list[bool]:
    """Report several failures; return for each whether the phase has changed."""
    return [quarantine.failed() for _ in range(times)]


def test_failures_in_a_row_lead_to_a_rest() -> None:
    """D6: after 20 consecutive failures, by default, the worker pauses; a success resets the count."""
    quarantine = Quarantine(clock=Clock())
    assert not any(failing(quarantine, 19))
    assert not quarantine.succeeded()
    assert failing(quarantine, 20) == [False] * 19 + [True]
    assert quarantine.phase is QuarantinePhase.RESTING
    assert quarantine.rest == 1.0


def test_rests_double_up_to_a_minute_and_end() -> None:
    """D6: each failed probe doubles the pause, up to a maximum; after the last probe the worker ends."""
    clock = Clock()
    quarantine = Quarantine(3, cooldown=10.0, longest=60.0, probes=5, clock=clock)
    failing(quarantine, 3)
    rests = []
    for _ in range(5):
        rests.append(quarantine.rest)
        clock.now += quarantine.rest - 0.001
        assert not quarantine.tick()
        clock.now += 0.002
        assert quarantine.tick()
        assert quarantine.phase is QuarantinePhase.PROBING
        assert quarantine.failed()
    assert rests == pytest.approx([10.0, 20.0, 40.0, 60.0, 60.0])
    assert quarantine.phase is QuarantinePhase.ENDED
    assert not quarantine.succeeded()
    assert not quarantine.failed()


def test_a_success_ends_it_at_once() -> None:
    """A success ends the quarantine at once, even that of a task which was running when the pause began.

    A failure of such a task is not counted.
    """
    clock = Clock()
    quarantine = Quarantine(3, clock=clock)
    failing(quarantine, 3)
    assert not quarantine.failed()
    assert quarantine.phase is QuarantinePhase.RESTING
    assert quarantine.succeeded()
    assert not quarantine.tick()
    failing(quarantine, 3)
    clock.now += 1.0
    quarantine.tick()
    assert quarantine.succeeded()
    failing(quarantine, 3)
    assert quarantine.rest == 1.0  # the next pause has the initial length again


def small() -> Quarantine:
    """Return a quarantine with short times."""
    return Quarantine(3, cooldown=0.05, longest=0.05, probes=2)


async def test_a_failing_worker_rests_and_recovers(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """D6: a pausing worker grants no credit, and then credit for one task.

    A success restores the full credit.
    """
    caplog.set_level(logging.INFO, "taskqueue.worker")
    worker = Worker(url=server.url, concurrency=1, prefetch=4, quarantine=small)
    healthy = threading.Event()

    @worker.task("work")
    async def act() -> None:
        if not healthy.is_set():
            raise OSError("disk full")

    async with running(worker):
        peer = await server.welcomed()
        tasks = [work() for _ in range(5)]
        await peer.deliver(*tasks)
        for _ in range(3):
            assert (await peer.next(RetryFrame)).error == "OSError: disk full"
        handed_back: list[str] = []
        while len(handed_back) < 2:
            handed_back += (await peer.next(RedeliverFrame)).receipts
        assert handed_back == [task.receipt for task in tasks[3:]]
        healthy.set()
        await until(lambda: "quarantine: trying one task" in caplog.messages)
        await peer.deliver(probe := work())
        assert (await peer.next(AckFrame)).receipts == [probe.receipt]
        credit = 0
        while credit < 6:  # five tasks used credit before, and the probe one more
            credit += (await peer.next(Credit)).n


async def test_credit_that_is_out_does_not_defeat_the_rest(server: FakeServer) -> None:
    """D6: deliveries that arrive during a pause are released, because granted credit cannot be withdrawn."""
    worker = Worker(url=server.url, concurrency=10, quarantine=lambda: Quarantine(3, cooldown=60))

    @worker.task("work")
    async def act() -> None:
        raise OSError

    async with running(worker):
        peer = await server.welcomed()
        await peer.deliver(*(work() for _ in range(3)))
        for _ in range(3):
            await peer.next(RetryFrame)
        await peer.deliver(late := work())
        assert (await peer.next(RedeliverFrame)).receipts == [late.receipt]
        # The worker may have granted credit for the first two failures, but none since the pause began.
        assert sum(frame.n for frame in peer.log if isinstance(frame, Credit)) <= 2


async def test_a_worker_that_does_not_recover_ends(server: FakeServer) -> None:
    """D6: after the last failed probe, the worker says bye and ends with exit code 3."""
    worker = Worker(url=server.url, concurrency=1, quarantine=small)

    @worker.task("work")
    def act() -> None:
        raise OSError

    async with running(worker) as ended:
        peer = await server.welcomed()
        for _ in range(4):  # three failures and one probe
            await peer.deliver(work())
            await peer.next(Credit)
        await peer.deliver(work())
        await peer.next(Bye)
        error = await outcome(ended)
        assert isinstance(error, WorkerQuarantined)
        assert error.exit_code == 3
        assert peer.count(RetryFrame) == 5


@pytest.mark.parametrize("verdict", [Reject("bad"), Again(0.0)], ids=("reject", "retry"))
async def test_outcomes_chosen_by_handlers_are_no_failures(
    server: FakeServer, verdict: Reject | Again
) -> None:
    """D6: an explicit reject or retry of a handler does not count as a failure."""
    worker = Worker(url=server.url, concurrency=9, quarantine=small)

    @worker.task("work")
    async def act() -> object:
        return verdict

    async with running(worker):
        peer = await server.welcomed()
        await peer.deliver(*(work() for _ in range(9)))
        kind = DeadLetterFrame if isinstance(verdict, Reject) else RetryFrame
        for _ in range(9):
            await peer.next(kind)
        credit = 0
        while credit < 9:
            credit += (await peer.next(Credit)).n

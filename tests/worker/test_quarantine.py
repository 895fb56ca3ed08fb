"""A worker that only fails takes itself out of service."""

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
    """Time that a test moves."""

    def __init__(self) -> None:
        """Start at 0."""
        self.now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def failing(quarantine: Quarantine, times: int) -> list[bool]:
    """Fail some times; return where the phase changed."""
    return [quarantine.failed() for _ in range(times)]


def test_failures_in_a_row_lead_to_a_rest() -> None:
    """D6: 20 in a row, by default; a success in between starts the count again."""
    quarantine = Quarantine(clock=Clock())
    assert not any(failing(quarantine, 19))
    assert not quarantine.succeeded()
    assert failing(quarantine, 20) == [False] * 19 + [True]
    assert quarantine.phase is QuarantinePhase.RESTING
    assert quarantine.rest == 1.0


def test_rests_double_up_to_a_minute_and_end() -> None:
    """D6: after each failed probe the rest is longer; the fifth one is the last."""
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
    """Also one of a task that was running when the rest began, whose failure would count for nothing."""
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
    assert quarantine.rest == 1.0  # the next time starts small again


def small() -> Quarantine:
    """Return one that is quick to test."""
    return Quarantine(3, cooldown=0.05, longest=0.05, probes=2)


async def test_a_failing_worker_rests_and_recovers(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """D6: at rest it asks for nothing, then for one task; a success brings the whole capacity back."""
    caplog.set_level(logging.INFO, "taskqueue.worker")
    worker = Worker(server.url, concurrency=1, prefetch=4, quarantine=small)
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
        while credit < 6:  # five were used up by then, and one more by the probe
            credit += (await peer.next(Credit)).n


async def test_credit_that_is_out_does_not_defeat_the_rest(server: FakeServer) -> None:
    """D6: credit cannot be taken back, so what arrives at rest is handed back."""
    worker = Worker(server.url, concurrency=10, quarantine=lambda: Quarantine(3, cooldown=60))

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
        # The first two failures may have been replaced; nothing was once the rest had begun.
        assert sum(frame.n for frame in peer.log if isinstance(frame, Credit)) <= 2


async def test_a_worker_that_does_not_recover_ends(server: FakeServer) -> None:
    """D6: after the last failed probe it says bye and why."""
    worker = Worker(server.url, concurrency=1, quarantine=small)

    @worker.task("work")
    def act() -> None:
        raise OSError

    async with running(worker) as ended:
        peer = await server.welcomed()
        for _ in range(4):  # three failures, and a probe
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
    """D6: rejecting a task or asking for a retry is a handler doing its work."""
    worker = Worker(server.url, concurrency=9, quarantine=small)

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

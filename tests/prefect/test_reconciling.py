"""Tests of runs that Prefect's database has scheduled but the queue does not have, without Prefect."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import msgspec
import pytest

from taskqueue_core.backend import Subscription
from taskqueue_core.tasks import State, Task
from taskqueue_memory import MemoryBackend
from taskqueue_prefect import task_runs
from taskqueue_prefect.names import RECEIVER, connection_of
from taskqueue_prefect.reconcile import Reconciler
from taskqueue_prefect.settings import PrefectSettings
from taskqueue_prefect.task_runs import AcceptedRun, Run

AGAIN = {State.WAITING, State.SCHEDULED}
GRACE, HELD, REMEMBER = 30.0, 3600.0, 7200.0
START = datetime(2026, 1, 1, tzinfo=UTC)


class Place:
    """An imitated database of runs, a queue, and a reconciler with a manual clock."""

    def __init__(self) -> None:
        self.backend = MemoryBackend()
        self.control = self.backend.control
        self.settings = PrefectSettings(_env_file=None, grace=GRACE, held=HELD, remember=REMEMBER)
        self.runs: list[Any] = []
        self.read = 0
        """number of runs that were read from the database"""
        self.forgotten = 0
        """number of times that the settings of queues were to be checked again"""
        self.now = 0.0
        self.reconciler = Reconciler(
            self,  # type: ignore[arg-type] # as much of a host as it takes
            lambda: self.now,
            lambda: START.timestamp() + self.now,
        )

    async def prepare(self, _: str) -> None:
        """Do nothing, because the queues need no preparation."""

    def forget(self) -> None:
        """Count the calls."""
        self.forgotten += 1

    def run(self, key: str = "k", age: float = 0) -> Any:
        """Add a run that was scheduled ``age`` seconds ago."""
        scheduled = datetime.now(UTC) - timedelta(seconds=age)
        updated = START + timedelta(seconds=self.now)
        run = Run(
            uuid4(),
            key,
            "run",
            str(uuid4()),
            scheduled,
            deferred=True,
            due_at=None,
            updated=updated,
        )
        self.runs.append(run)
        return run

    async def pass_by(self, seconds: float) -> int:
        """Advance the clock and run one check; return how many runs were published again."""
        self.now += seconds
        return await self.reconciler.check_once()

    async def accepted(self, run: Any, by: str) -> Subscription:
        """Let a worker accept a run and stay connected; return its subscription, which represents the connection."""
        task = task_runs.task_of(run)
        settings = await self.control.settings(task.key)
        if settings.version == 0:
            kept = {"result_ttl": 60.0, "dedupe_window": 60.0}
            await self.control.configure(task.key, settings.model_copy(update=kept))
        await self.backend.publisher.publish(task)
        worker = self.backend.subscribe([task.key], by)
        (delivery,) = (await worker.receive(1, 0)).deliveries
        word = msgspec.json.encode(AcceptedRun(worker=by, state=run.state_id))
        await worker.ack(delivery, results=[word])
        return worker

    async def state(self, run: Any) -> State | None:
        """Return the state of a run in the queue."""
        (status,) = await self.control.statuses(run.task_key, str(run.id))
        return None if status is None else status.state


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    """Return a place whose runs are read from a list instead of Prefect's database."""
    place = Place()

    def read(runs: Iterable[Any], limit: int) -> list[Any]:
        found = list(runs)[:limit]
        place.read += len(found)
        return found

    async def scheduled_after(last: UUID, limit: int) -> list[Any]:
        found = (run for run in place.runs if run.id > last)
        return read(sorted(found, key=lambda run: run.id), limit)

    async def scheduled_since(time: datetime, last: UUID, limit: int) -> list[Any]:
        found = (run for run in place.runs if (run.updated, run.id) > (time, last))
        return read(sorted(found, key=lambda run: (run.updated, run.id)), limit)

    async def scheduled_among(run_ids: Sequence[UUID]) -> list[Any]:
        return read((run for run in place.runs if run.id in run_ids), len(run_ids))

    for function in (scheduled_after, scheduled_since, scheduled_among):
        monkeypatch.setattr(task_runs, function.__name__, function)
    return place


async def test_what_the_queue_does_not_have(place: Place) -> None:
    """Row E8: a run that stays missing in the queue for the grace period is published once.

    As the store may have lost settings too, those of the run's queue are checked before.
    """
    run = place.run()
    assert await place.pass_by(0) == 0
    assert await place.pass_by(GRACE - 1) == 0
    assert place.forgotten == 0
    assert await place.pass_by(1) == 1
    assert place.forgotten == 1
    assert await place.state(run) is State.WAITING
    assert await place.pass_by(GRACE) == await place.pass_by(GRACE) == 0


async def test_one_that_cannot_be_put_in(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """Row E8: an invalid run and a full queue do not block other runs, and each is logged once."""
    settings = await place.control.settings("full")
    await place.control.configure("full", settings.model_copy(update={"capacity": 2}))
    crowd = [place.run("full") for _ in range(220)]
    odd = place.run()._replace(name="\ud800")
    place.runs[-1] = odd
    live = [place.run(f"live-{n}") for n in range(3)]
    await place.pass_by(0)
    for _ in range(3):
        await place.pass_by(GRACE)
    assert {await place.state(run) for run in live} == {State.WAITING}
    states = [await place.state(run) for run in crowd]
    assert states.count(State.WAITING) == 2
    told = [line.getMessage() for line in caplog.records]
    assert len([line for line in told if str(odd.id) in line]) == 1
    assert len(told) == len(set(told))
    worker = place.backend.subscribe(["full"], "w")
    await worker.ack(*(await worker.receive(2, 0)).deliveries)
    for run, state in zip(crowd, states, strict=True):
        if state is State.WAITING:
            place.runs.remove(run)
    assert await place.pass_by(1) == 2, "runs are published once the queue has capacity"


async def test_many_that_are_missing(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """Row U26: a pass logs one line, however many runs it has enqueued again."""
    for number in range(250):
        place.run(f"k-{number % 3}")
    await place.pass_by(0)
    assert await place.pass_by(GRACE) == 250
    assert [line.getMessage() for line in caplog.records] == [
        "runs that waited and were not in the queue, enqueued again: 250"
    ]


async def test_only_changes_are_read(place: Place) -> None:
    """Row U26 (D3): for 50 seconds after a pass over 10,000 runs, only changed and missing ones are read.

    So full passes read 200 runs per second on average.
    """
    for _ in range(10_000):
        run = place.run()
        await place.backend.publisher.publish(task_runs.task_of(run))
    await place.pass_by(70)  # a pass reads the changes of the last minute
    assert place.read == 10_000
    place.read = 0
    lost, late = place.run(), place.run()
    late = place.runs[-1] = late._replace(updated=late.updated - timedelta(seconds=50))
    await place.pass_by(5)
    assert place.read == 2, "the transaction of one of them took long"
    assert await place.pass_by(5) == 0
    assert await place.pass_by(GRACE) == 2
    assert place.read <= 2 + 4 + 4
    assert await place.state(lost) is await place.state(late) is State.WAITING
    place.read = 0
    await place.pass_by(50)
    assert place.read == 10_002


async def test_many_that_stay_missing(place: Place) -> None:
    """Row U26 (D3): of many runs that cannot be enqueued, a limited number is read again in each pass, in turns."""
    settings = await place.control.settings("full")
    await place.control.configure("full", settings.model_copy(update={"capacity": 1}))
    for _ in range(5000):
        place.run("full")
    await place.pass_by(70)
    assert await place.pass_by(GRACE) == 1
    place.now += 60
    live = place.run()
    await place.pass_by(1)
    place.read = 0
    for _ in range(3):
        await place.pass_by(1)
    assert place.read == 3 * (2000 + 2)
    assert await place.pass_by(GRACE) == 1
    assert await place.state(live) is State.WAITING


async def test_a_pending_run(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row U26: a run that is pending stays with its worker, and is scheduled again once that worker is gone."""
    again: list[Run] = []

    async def schedule_again(run: Run) -> bool:
        again.append(run)
        return True

    monkeypatch.setattr(task_runs, "schedule_again", schedule_again)
    run = place.run()
    worker = await place.accepted(run, connection_of("w", "1"))
    place.runs[0] = run = run._replace(deferred=False, pending=True, state_id=str(uuid4()))
    await place.pass_by(0)
    assert await place.pass_by(100 * HELD) == 0
    await worker.close()
    assert await place.pass_by(1) == 0
    assert await place.pass_by(GRACE) == 1
    assert again == [run]


async def test_a_worker_that_has_it(place: Place) -> None:
    """Row E8: a run stays with the worker that has accepted it for as long as its connection is open."""
    run = place.run()
    worker = await place.accepted(run, connection_of("w", "1"))
    await place.pass_by(0)
    assert await place.pass_by(100 * HELD) == 0
    await worker.close()
    assert await place.pass_by(1) == 0
    assert await place.pass_by(GRACE) == 1
    assert await place.state(run) in AGAIN


@pytest.mark.parametrize("twin", [True, False], ids=["another of its name", "connected anew"])
async def test_its_name_stays_in_use(place: Place, *, twin: bool) -> None:
    """Row REV-E5: another connection with the same client id may be the same worker.

    The run is then published again, but later.
    """
    run = place.run()
    other = place.backend.subscribe(["k"], connection_of("w", "0")) if twin else None
    worker = await place.accepted(run, connection_of("w", "1"))
    await worker.close()
    rescued = 0
    for number in range(2, 12):  # each check finds another connection
        if other is None or not twin:
            if other is not None:
                await other.close()
            other = place.backend.subscribe(["k"], connection_of("w", str(number)))
        rescued = await place.pass_by(HELD / 9)
        assert rescued == (number == 11)
    assert await place.state(run) in AGAIN


async def test_who_may_have_accepted_it_long_ago(place: Place) -> None:
    """Row E8: if the queue has forgotten a run, a worker that was already connected then may have it.

    Without one, the run is lost and published again. The connection of a server is no worker.
    """
    old = place.run(age=3 * REMEMBER)
    worker: Any = place.backend.subscribe(["k"], connection_of("w", "1"))
    server: Any = place.backend.subscribe(["k"], connection_of(RECEIVER, "1"))
    for each in (worker, server):
        each.since -= 2 * REMEMBER
    await place.pass_by(0)
    assert await place.pass_by(100 * HELD) == 0
    await worker.close()
    place.backend.subscribe(["k"], connection_of("w", "2"))
    await place.pass_by(1)
    assert await place.pass_by(GRACE) == 1
    assert await place.state(old) is State.WAITING


async def test_what_was_ended_by_hand(place: Place) -> None:
    """Row E8: a run that an operator has cancelled in the queue is not published again."""
    run = place.run()
    await place.backend.publisher.publish(task_runs.task_of(run))
    await place.control.cancel("k", str(run.id))
    await place.pass_by(0)
    assert await place.pass_by(100 * HELD) == 0
    assert await place.state(run) is State.CANCELLED


def test_an_entry_says_little() -> None:
    """Row E8: the queue's entry contains only the ids of a run and its state, however large the run is."""
    state = SimpleNamespace(
        id=uuid4(),
        timestamp=datetime.now(UTC),
        is_scheduled=lambda: True,
        state_details=SimpleNamespace(deferred=True, scheduled_time=None),
    )
    large = {"x": "y" * 2_000_000}
    run: Any = SimpleNamespace(id=uuid4(), task_key="k", name="run", state=state, task_inputs=large)
    task = task_runs.task_of(Run.of(run))
    assert isinstance(task, Task)
    assert len(task.payload) < 300
    assert task_runs.state_of(task)[0] == str(run.state.id)

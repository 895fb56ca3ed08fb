"""`reconcile`: publishing the tasks that the application's database has and the queue lacks."""

from collections.abc import AsyncIterator, Callable
from importlib import import_module
from typing import Any

import pytest

from taskqueue_core import InvalidInput, PublishUnconfirmed, Queue, Reconciled, Task, reconcile
from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.capabilities.require import dead_lettering_of
from taskqueue_core.clock import ManualClock
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.retry import RetryPolicy
from taskqueue_core.tasks import Confirmation, Published, State
from taskqueue_memory import MemoryBackend
from tests.core.fakes import ScriptedBackend, accepted

pytestmark = pytest.mark.fast_clock


class Counting(MemoryBackend):
    """Memory backend that records published ids and the sizes of status queries, and can be made to fail."""

    def __init__(self) -> None:
        super().__init__(clock=ManualClock())
        self.sent: list[list[str]] = []
        self.asked: list[int] = []
        self.lost = 0
        """number of upcoming publishes whose answers will be lost"""
        self.out = False
        publish, statuses = self.publisher.publish, self.control.statuses

        async def noted(*tasks: Task) -> tuple[Confirmation, ...]:
            if self.out:
                raise BackendUnavailable("out of reach")
            self.sent.append([task.id for task in tasks])
            answers = await publish(*tasks)
            if self.lost:
                self.lost -= 1
                raise PublishUnconfirmed("the response was lost")
            return answers

        async def asked(key: str, *task_ids: str) -> Any:
            self.asked.append(len(task_ids))
            return await statuses(key, *task_ids)

        self.publisher.publish = noted  # type: ignore[method-assign]
        self.control.statuses = asked  # type: ignore[method-assign]


@pytest.fixture
def backend() -> Counting:
    """An empty backend that records what it is asked."""
    return Counting()


@pytest.fixture
def queue(backend: Counting) -> Queue:
    """A queue on the recording backend."""
    return Queue(backend)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the pause before a publish is repeated."""
    monkeypatch.setattr("taskqueue_core.queue._PAUSE", RetryPolicy(base=0.001, cap=0.001))


def rows(number: int, key: str = "k") -> list[Task]:
    """Return the tasks of the application's database."""
    return [Task(key=key, id=f"t{n}", payload=b"%d" % n) for n in range(number)]


async def test_what_is_missing_is_published(queue: Queue, backend: Counting) -> None:
    """D1: only missing tasks are published; a task that the queue knows in any state is not sent again."""
    everything = rows(10)
    await queue.publish_many(everything[:7])
    async with queue.subscribe("k", consumer="w") as subscription:
        first, second, third = (await subscription.receive(3, 0)).deliveries
        await subscription.ack(first)
        await dead_lettering_of(backend, subscription).dead_letter(second, "bad")
        backend.sent.clear()
        report = await reconcile(queue, everything)
        assert report == Reconciled(checked=10, missing=3, republished=3)
        assert backend.sent == [["t7", "t8", "t9"]]
        assert await reconcile(queue, everything) == Reconciled(checked=10)
        assert len(backend.sent) == 1
        await subscription.ack(third)
    ledger = await queue.ledger("k")
    assert (ledger.published, ledger.done, ledger.dead, ledger.waiting) == (10, 2, 1, 7)


async def test_nothing_is_done_twice_during_a_publish(queue: Queue, backend: Counting) -> None:
    """D1, law 7: a task that another process publishes between the status query and the publish is stored once."""
    tasks = rows(4)
    asked = backend.control.statuses

    async def meanwhile(key: str, *task_ids: str) -> Any:
        found = await asked(key, *task_ids)
        await queue.publish_many(tasks[:2])
        return found

    backend.control.statuses = meanwhile  # type: ignore[method-assign]
    report = await reconcile(queue, tasks)
    assert report == Reconciled(checked=4, missing=4, republished=4)
    assert (await queue.ledger("k")).published == 4


async def test_batches_are_bounded(
    queue: Queue, backend: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D1: batches are limited by count and size, may span several queues, and the iterable is read only as needed."""
    read = 0

    async def database() -> AsyncIterator[Task]:
        nonlocal read
        for key in ("k", "other"):
            for task in rows(5, key):
                read += 1
                yield task

    far: list[tuple[str, str, int, int]] = []

    def passed(task: Task, report: Reconciled) -> None:
        far.append((task.key, task.id, report.checked, read))

    report = await reconcile(queue, database(), batch=4, passed=passed)
    assert report == Reconciled(checked=10, missing=10, republished=10)
    assert [len(ids) for ids in backend.sent] == [4, 4, 2]
    assert backend.asked == [4, 1, 3, 2]
    assert far == [("k", "t3", 4, 4), ("other", "t2", 8, 8), ("other", "t4", 10, 10)]
    monkeypatch.setattr(import_module("taskqueue_core.reconciliation"), "_BYTES", 25)
    backend.sent.clear()
    big = [Task(key="k", id=f"big{n}", payload=b'"0123456789"') for n in range(5)]
    await reconcile(queue, big)
    assert [len(ids) for ids in backend.sent] == [3, 2]


async def test_lost_answers(queue: Queue, backend: Counting) -> None:
    """D1: a publish whose answer is lost is repeated with the same ids: one copy of each task, and a correct report."""
    backend.lost = 3
    report = await reconcile(queue, rows(3))
    assert report == Reconciled(checked=3, missing=3, republished=3)
    assert backend.sent == [["t0", "t1", "t2"]] * 4
    assert (await queue.ledger("k")).published == 3


async def test_it_goes_on_where_it_ended(queue: Queue, backend: Counting) -> None:
    """D1: after an outage, reconciling only the remaining tasks is enough; repeating all of it does no harm."""
    tasks, done, parts = rows(9), 0, Reconciled()

    def passed(task: Task, report: Reconciled) -> None:
        nonlocal done, parts
        done, parts = tasks.index(task) + 1, report
        backend.out = done == 6

    with pytest.raises(BackendUnavailable):
        await reconcile(queue, tasks, batch=3, passed=passed)
    assert (done, parts.republished) == (6, 6)
    backend.out = False
    assert parts + await reconcile(queue, tasks[done:]) == Reconciled(
        checked=9, missing=9, republished=9
    )
    assert await reconcile(queue, tasks) == Reconciled(checked=9)
    assert (await queue.ledger("k")).published == 9


async def test_refused(queue: Queue, backend: Counting) -> None:
    """D1, law 6: tasks refused because the queue is full are counted, and are accepted by a later run."""
    settings = await backend.control.configure("k", QueueSettings(capacity=2))
    report = await reconcile(queue, rows(5))
    assert report == Reconciled(checked=5, missing=5, republished=2, refused=3)
    await backend.control.configure("k", QueueSettings(version=settings.version))
    report = await reconcile(queue, rows(5))
    assert report == Reconciled(checked=5, missing=3, republished=3)


async def test_conflicts(queue: Queue, backend: Counting) -> None:
    """D1: with ``compare``, an id that is stored with another payload is reported; the stored task does not change."""
    await queue.publish("k", "another", id="t1")
    assert (await reconcile(queue, rows(3))).conflicts == 0
    report = await reconcile(queue, rows(4), compare=True)
    assert report == Reconciled(checked=4, missing=1, republished=1, conflicts=1)
    assert backend.sent[-1] == ["t0", "t1", "t2", "t3"]
    status = await queue.status("k", "t1")
    assert status is not None
    assert status.state is State.WAITING


async def test_without_control() -> None:
    """D1: without the control capability all tasks are sent; known ones are recognised by the answers only."""
    backend = ScriptedBackend()
    known = {"t0": Published.DUPLICATE, "t1": Published.CONFLICT, "t2": Published.REFUSED}
    answers: Callable[[Task], Confirmation] = lambda task: Confirmation(  # noqa: E731
        key=task.key, task_id=task.id, status=known.get(task.id, accepted(task).status)
    )
    backend.answer = answers
    report = await reconcile(Queue(backend), iter(rows(5)))
    assert report == Reconciled(checked=5, missing=3, republished=2, refused=1, conflicts=1)
    assert len(backend.calls) == 1


async def test_nothing_to_do(queue: Queue, backend: Counting) -> None:
    """Without tasks, `reconcile` makes no call to the backend."""
    assert await reconcile(queue, []) == Reconciled()
    assert (backend.sent, backend.asked) == ([], [])


@pytest.mark.parametrize("batch", [0, -1, 1001, 1.5, True, "5"])
async def test_bad_batches(queue: Queue, batch: Any) -> None:
    """A batch size that is out of range or no integer is rejected."""
    with pytest.raises(InvalidInput, match=r"^batch: got "):
        await reconcile(queue, rows(1), batch=batch)

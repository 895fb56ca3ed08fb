"""`Queue`, the class for applications: publishing tasks, reading their status, and handling errors."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from taskqueue_core import IdConflict, InvalidInput, PublishUnconfirmed, QueueFull, Task, connect
from taskqueue_core.after import After, TaskRef
from taskqueue_core.assembly import open_backend
from taskqueue_core.capabilities import QueueSettings, control_of
from taskqueue_core.clock import ManualClock
from taskqueue_core.confirmations import is_absent
from taskqueue_core.errors import BackendNotFound, BackendUnavailable, CapabilityMissing
from taskqueue_core.hooks import HOOK_API
from taskqueue_core.instrumented import InstrumentedBackend
from taskqueue_core.limits import LIMITS
from taskqueue_core.publish_order import in_parts
from taskqueue_core.queue import Queue
from taskqueue_core.tasks import Confirmation, Ledger, Published, Refusal, State
from taskqueue_core.uniqueness import UniqueKey
from taskqueue_memory import MemoryBackend
from tests.core.fakes import ScriptedBackend

pytestmark = pytest.mark.fast_clock


@pytest.fixture
def queue(clock: ManualClock) -> Queue:
    """A queue object on a memory backend."""
    return Queue(MemoryBackend(clock=clock))


@pytest.fixture
def scripted() -> ScriptedBackend:
    """A backend that records its calls and answers as the test says."""
    return ScriptedBackend()


async def take(queue: Queue, key: str = "k") -> Task:
    """Receive the next task of a queue, ack it with a result, and return it."""
    async with queue.subscribe(key, consumer="w") as subscription:
        received = await subscription.receive(1, 0)
        await subscription.ack(*received.deliveries, results=[b'{"done":true}'])
    return received.deliveries[0].task


async def test_publish_to_result(queue: Queue) -> None:
    """After a task was published and executed, its status, its result and the ledger of its queue can be read."""
    confirmation = await queue.publish("k", {"n": 1})
    assert confirmation.status is Published.ACCEPTED
    assert await queue.result("k", confirmation.task_id) is None
    assert (await take(queue)).value() == {"n": 1}
    status = await queue.status("k", confirmation.task_id)
    assert status is not None
    assert status.state is State.DONE
    assert await queue.result("k", confirmation.task_id) == {"done": True}
    assert await queue.ledger("k") == Ledger(published=1, done=1)


async def test_options_reach_the_task(queue: Queue, clock: ManualClock) -> None:
    """Every publish option sets a field of the task; ``delay`` and ``expires_in`` become times of the store's clock."""
    now = clock.now()
    confirmation = await queue.publish(
        "k",
        [1],
        id="t-1",
        priority=9,
        delay=5,
        expires_in=60,
        tenant="acme",
        ordering_key="order-7",
        headers={"traceparent": "x"},
        max_attempts=3,
    )
    assert (confirmation.task_id, confirmation.status) == ("t-1", Published.ACCEPTED)
    await clock.advance(5)
    assert await take(queue) == Task(
        key="k",
        payload=b"[1]",
        id="t-1",
        priority=9,
        not_before=now + 5,
        deadline=now + 60,
        tenant="acme",
        ordering_key="order-7",
        headers={"traceparent": "x"},
        max_attempts=3,
    )


async def test_points_in_time(queue: Queue, clock: ManualClock) -> None:
    """Law 8: ``not_before`` and ``deadline`` can be given as absolute times, which reach the worker unchanged."""
    now = clock.now()
    await queue.publish("k", id="a", not_before=now + 1, deadline=now + 2)
    assert await queue.ledger("k") == Ledger(published=1, scheduled=1)
    await clock.advance(1)
    task = await take(queue)
    assert (task.not_before, task.deadline) == (now + 1, now + 2)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"delay": 1, "not_before": 2_000_000_000}, "delay"),
        ({"expires_in": 1, "deadline": 2_000_000_000}, "expires_in"),
        ({"delay": -1}, "delay"),
        ({"delay": float("nan")}, "delay"),
        ({"expires_in": -0.5}, "expires_in"),
        ({"deadline": float("nan")}, "deadline"),
        ({"priority": 10}, "priority"),
        ({"id": "{a}{b}"}, "id"),
        ({"headers": {"a": "\n"}}, "headers"),
        ({"payload": float("nan")}, "payload"),
    ],
    ids=lambda value: repr(value)[:40],
)
async def test_bad_options_are_named(options: dict[str, Any], field: str, queue: Queue) -> None:
    """Faults K2, K3 and K4: an invalid option is refused with an error that names it, and nothing is stored."""
    with pytest.raises(InvalidInput, match=rf"^{field}: got ") as caught:
        await queue.publish("k", **options)
    assert caught.value.field == field
    assert await queue.ledger() == Ledger()


async def test_publishing_twice(queue: Queue) -> None:
    """Law 7: publishing the same id and payload twice stores one task.

    Another payload for this id raises `IdConflict`.
    """
    await queue.publish("k", 1, id="t")
    again = await queue.publish("k", 1, id="t")
    assert (again.status, again.stored) == (Published.DUPLICATE, True)
    with pytest.raises(IdConflict, match="'k'") as caught:
        await queue.publish("k", 2, id="t")
    assert caught.value.task_id == "t"
    assert await queue.ledger("k") == Ledger(published=1, waiting=1)


async def test_a_full_queue(scripted: ScriptedBackend) -> None:
    """B13, law 6: a refused publish raises `QueueFull` with the reason and the delay before the next attempt."""
    scripted.answer = lambda task: Confirmation(
        key=task.key,
        task_id=task.id,
        status=Published.REFUSED,
        reason="1000 waiting",
        retry_after=2.0,
    )
    with pytest.raises(QueueFull, match="'k' refused the task: 1000 waiting") as caught:
        await Queue(scripted).publish("k", id="t")
    assert (caught.value.task_id, caught.value.retry_after) == ("t", 2.0)
    (confirmation,) = await Queue(scripted).publish_many([Task(key="k")])
    assert not confirmation.stored


@pytest.mark.parametrize("losses", [1, 3])
async def test_a_lost_answer_is_asked_for_again(losses: int, scripted: ScriptedBackend) -> None:
    """D1, fault E1: if the answer of the store is lost, the publish is sent again with the same id."""
    scripted.publish_errors = [PublishUnconfirmed("lost")] * losses
    confirmation = await Queue(scripted).publish("k")
    assert scripted.calls == [("publish", confirmation.task_id)] * (losses + 1)


async def test_a_store_that_stays_silent(scripted: ScriptedBackend) -> None:
    """D1, fault E1: if no answer arrives after several attempts, the error has the task id for publishing again."""
    scripted.publish_errors = [PublishUnconfirmed("lost")] * 100
    with pytest.raises(PublishUnconfirmed) as caught:
        await Queue(scripted).publish("k")
    assert {call[1] for call in scripted.calls} == {caught.value.task_id}
    assert len(scripted.calls) == 4


async def test_other_errors_are_not_retried(scripted: ScriptedBackend) -> None:
    """If the store is unavailable, the publish fails at once without a retry, because nothing was sent."""
    scripted.publish_errors = [BackendUnavailable("down")]
    with pytest.raises(BackendUnavailable):
        await Queue(scripted).publish("k")
    assert len(scripted.calls) == 1


@pytest.mark.parametrize("count", [0, 1, LIMITS.batch, LIMITS.batch + 1, 2 * LIMITS.batch + 1])
async def test_large_batches_are_split(count: int, scripted: ScriptedBackend) -> None:
    """A large batch is split into calls within the size limit, and the confirmations keep the order of the tasks."""
    tasks = [Task(key="k") for _ in range(count)]
    confirmations = await Queue(scripted).publish_many(iter(tasks))
    assert [c.task_id for c in confirmations] == [task.id for task in tasks]
    sizes = [len(call) - 1 for call in scripted.calls]
    assert sum(sizes) == count
    assert all(0 < size <= LIMITS.batch for size in sizes)
    assert len(sizes) == -(-count // LIMITS.batch)


async def test_one_refused_task_does_not_hold_up_a_batch(queue: Queue) -> None:
    """Each task of a batch gets its own confirmation; a task that is refused raises no error and affects no other."""
    one, other = Task(key="k", id="t", payload=b"1"), Task(key="k", id="t", payload=b"2")
    statuses = [c.status for c in await queue.publish_many([one, other, one, Task(key="k")])]
    assert statuses == ["accepted", "conflict", "duplicate", "accepted"]


def waiting(task_id: str, *parents: str) -> Task:
    """Return a task that waits for others of its queue."""
    return Task(
        key="k", id=task_id, after=After(tasks=tuple(TaskRef("k", each) for each in parents))
    )


@pytest.mark.parametrize("why", ["full", "conflict", "unique"])
async def test_a_parent_of_the_same_call_that_is_not_stored(queue: Queue, why: str) -> None:
    """U15: the tasks that wait for it are refused as well, and can be published again; others are stored."""
    control, parent = control_of(queue.backend), Task(key="k", id="a", payload=b"1")
    if why == "full":
        await control.configure("k", QueueSettings(capacity=1))
        await queue.publish("k")
    elif why == "conflict":
        await queue.publish("k", 2, id="a")
    else:
        await queue.publish("k", id="other", unique=UniqueKey(key="one"))
        parent = msgspec.structs.replace(parent, unique=UniqueKey(key="one"))
    before = await queue.ledger()
    free = Task(key="free", id="c", after=After(tasks=(TaskRef("free", "b"),)))
    first, *refused, root, last = await queue.publish_many(
        [parent, waiting("b", "a"), waiting("c", "b"), Task(key="free", id="b"), free]
    )
    assert is_absent(first)
    assert (root.status, last.status) == (Published.ACCEPTED, Published.ACCEPTED)
    assert [answer.code for answer in refused] == [Refusal.PARENT_REFUSED] * 2
    assert [answer.retry_after for answer in refused] == [first.retry_after] * 2
    assert "'a' of queue 'k'" in str(refused[0].reason)
    assert ("holds its unique key" in str(refused[0].reason)) is (why == "unique")
    assert await control.statuses("k", "b") == (None,)
    assert (await queue.ledger()).published - before.published == 2
    if why == "full":
        await control.configure("k", QueueSettings(capacity=10, version=1))
        again = await queue.publish_many([parent, waiting("b", "a")])
        assert [answer.status for answer in again] == ["accepted"] * 2


async def test_parts_of_a_call() -> None:
    """U15: tasks are published after those that they wait for, in parts of a limited size, otherwise in order."""
    ids = ["a", "b", "c", "d", "e", "f"]
    parents = {"b": ("a",), "d": ("b", "never"), "e": ("f",)}
    tasks = [
        waiting(each, *parents[each]) if each in parents else Task(key="k", id=each) for each in ids
    ]
    parts = [[ids[place] for place in part] for part in in_parts(tasks, 3)]
    assert parts == [["a", "c", "e"], ["f"], ["b"], ["d"]]


async def test_ledgers(queue: Queue) -> None:
    """Law 1: the ledger of several queues, or of all, is the sum of their ledgers.

    An unknown queue has an empty ledger.
    """
    for key in ("a", "a", "b"):
        await queue.publish(key)
    assert await queue.ledger() == Ledger(published=3, waiting=3)
    assert await queue.ledger("a", "c") == Ledger(published=2, waiting=2)
    assert await queue.status("c", "t") is None
    assert await queue.result("c", "t") is None


async def test_looking_up_needs_control(scripted: ScriptedBackend) -> None:
    """Without the ``control`` capability, reading a status, a result or a ledger raises `CapabilityMissing`."""
    queue = Queue(scripted)
    for call in (queue.status("k", "t"), queue.result("k", "t"), queue.ledger()):
        with pytest.raises(CapabilityMissing, match="control"):
            await call


@pytest.mark.parametrize("word", ["taskqueue_memory", "taskqueue_memory:MemoryBackend", None])
async def test_connect_by_name(word: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """E3, G3: ``connect`` opens the backend named by its argument or by the settings, and closes it at the end."""
    monkeypatch.setenv("TASKQUEUE_BACKEND", "taskqueue_memory" if word is None else "nowhere")
    async with connect(word) as queue:
        assert isinstance(queue.backend, InstrumentedBackend)
        assert (await queue.publish("k")).stored
        assert (await queue.backend.health()).ok
    assert not (await queue.backend.health()).ok


async def test_connect_to_a_backend(scripted: ScriptedBackend) -> None:
    """``connect`` does not close a backend object that the caller passed in."""
    async with connect(scripted) as queue:
        await queue.publish("k")
    assert scripted.closed == 0


async def test_connect_closes_after_an_error() -> None:
    """``connect`` closes the backend if the body of the block raises."""
    with pytest.raises(ZeroDivisionError):
        async with connect("taskqueue_memory") as queue:
            raise ZeroDivisionError
    assert not (await queue.backend.health()).ok


async def test_connect_to_nothing() -> None:
    """``connect`` raises `BackendNotFound` for a name that no backend has."""
    with pytest.raises(BackendNotFound):
        async with connect("no-such-backend"):
            pass


def test_plugins_are_loaded_around_the_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installed plugins observe a backend that was opened by name, unless the settings deny them."""
    plugin = f"TASKQUEUE_HOOK_API = {HOOK_API}\n"
    (tmp_path / "an_installed_plugin.py").write_text(plugin, encoding="utf-8")
    folder = tmp_path / "an_installed_plugin-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: an-installed-plugin\nVersion: 1\n", encoding="utf-8")
    (folder / "entry_points.txt").write_text(
        "[taskqueue.plugins]\ntoy = an_installed_plugin\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert "toy" in open_backend("taskqueue_memory").hooks.plugins
    monkeypatch.setenv("TASKQUEUE_PLUGINS_DENY", "toy,other")
    assert "toy" not in open_backend("taskqueue_memory").hooks.plugins


async def test_control_stays_within_reach(queue: Queue) -> None:
    """Operations that `Queue` does not offer are available through its ``backend``."""
    await queue.publish("k")
    assert await control_of(queue.backend).queues() == ("k",)

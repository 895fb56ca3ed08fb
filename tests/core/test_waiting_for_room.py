"""Publishing with ``wait``: a refused publish is retried until it is accepted or the time is over."""

import asyncio
import itertools
from contextlib import suppress
from typing import Any, Self

import msgspec
import pytest

from taskqueue_core import InvalidInput, PublishUnconfirmed, QueueFull, Task, connect_sync
from taskqueue_core.backend import Capabilities, Capability
from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.hooks import Hooks
from taskqueue_core.instrumented import InstrumentedBackend
from taskqueue_core.queue import Queue
from taskqueue_core.tasks import Confirmation, Published, Refusal
from tests.clock import LoopClock
from tests.core.fakes import ScriptedBackend, accepted

pytestmark = pytest.mark.fast_clock


class Door(ScriptedBackend):
    """A backend that refuses each task a given number of times, with a suggested delay before the next attempt."""

    def __init__(self, times: float, retry_after: float | None = 0.01) -> None:
        super().__init__()
        self.answer = self._answer
        self._left: dict[str, float] = {}
        self._times = times
        self._retry_after = retry_after

    def _answer(self, task: Task) -> Confirmation:
        left = self._left.setdefault(task.id, self._times)
        self._left[task.id] = left - 1
        return accepted(task) if left <= 0 else self._refusal(task)

    def _refusal(self, task: Task) -> Confirmation:
        return Confirmation(
            key=task.key,
            task_id=task.id,
            status=Published.REFUSED,
            code=Refusal.INTAKE_PAUSED,
            reason="the intake is paused",
            retry_after=self._retry_after,
            depth=7,
        )


NEVER = float("inf")


async def test_room_comes_in_time() -> None:
    """B13: a refused task is published again, with the same id, until it is accepted."""
    door = Door(2)
    confirmation = await Queue(door).publish("k", id="t", wait=5)
    assert confirmation.status is Published.ACCEPTED
    assert door.calls == [("publish", "t")] * 3


async def test_without_waiting_it_is_asked_once() -> None:
    """B13: without ``wait``, a refusal raises at once, with code, suggested delay and depth."""
    door = Door(1)
    with pytest.raises(QueueFull, match="intake is paused") as caught:
        await Queue(door).publish("k", id="t")
    error = caught.value
    assert (error.code, error.retry_after, error.depth) == ("intake_paused", 0.01, 7)
    assert len(door.calls) == 1


@pytest.mark.parametrize("hint", [0.0, 0.03, 60.0])
async def test_the_end_is_kept(hint: float) -> None:
    """B13: whatever delay is suggested, a publish waits for its full time and tries once more.

    Then it raises the last refusal.
    """
    door = Door(NEVER, hint)
    clock = LoopClock()
    start = clock.now()
    with pytest.raises(QueueFull) as caught:
        await Queue(door).publish("k", wait=0.1)
    assert 0.1 <= clock.now() - start < 0.2
    assert caught.value.retry_after == hint
    assert 2 <= len(door.calls) <= 7


async def test_a_hint_is_a_least_and_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher waits at least the suggested delay; jitter spreads the retries of publishers refused together."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    for _ in range(20):
        await Queue(Door(1, 2.0)).publish("k", wait=10)
    assert all(2.0 <= seconds <= 3.0 for seconds in slept)
    assert len(set(slept)) == 20


async def test_some_of_a_batch() -> None:
    """Only the refused tasks of a batch are sent again.

    Confirmations keep the order of the tasks, and refusals raise no error.
    """
    door = Door(0)
    late = itertools.count()

    def answer(task: Task) -> Confirmation:
        if task.id == "never" or (task.id == "late" and next(late) < 2):
            return door._refusal(task)
        return accepted(task)

    door.answer = answer
    tasks = [Task(key="k", id=task_id) for task_id in ("a", "never", "b", "late")]
    found = await Queue(door).publish_many(tasks, wait=0.2)
    assert [(one.task_id, one.stored) for one in found] == [
        ("a", True),
        ("never", False),
        ("b", True),
        ("late", True),
    ]
    assert door.calls[:4] == [
        ("publish", "a", "never", "b", "late"),
        ("publish", "never", "late"),
        ("publish", "never", "late"),
        ("publish", "never"),
    ]


async def test_what_waiting_cannot_help() -> None:
    """A refusal without a suggested delay is final, so the publish is not retried."""
    door = Door(1, None)
    with pytest.raises(QueueFull):
        await Queue(door).publish("k", wait=5)
    assert len(door.calls) == 1


async def test_a_lost_answer_while_waiting() -> None:
    """D1: if an answer is lost while a publish waits for room, the publish is sent again."""
    door = Door(1)
    door.publish_errors = [PublishUnconfirmed("lost")]
    assert (await Queue(door).publish("k", wait=5)).stored
    assert len(door.calls) == 3


async def test_an_end_from_outside() -> None:
    """A publish that is cancelled while it waits ends at once."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await Queue(Door(NEVER, 30)).publish("k", wait=60)


@pytest.mark.parametrize("wait", [-1, float("nan"), float("inf"), "5", None])
async def test_bad_waits(wait: Any) -> None:
    """An invalid ``wait`` is refused like any invalid duration, with an error that names it."""
    with pytest.raises(InvalidInput, match=r"^wait: got "):
        await Queue(Door(0)).publish("k", wait=wait)


def test_the_synchronous_twin_waits_too() -> None:
    """`SyncQueue` supports ``wait`` as `Queue` does."""
    with connect_sync(Door(2)) as queue:
        assert queue.publish("k", wait=5).stored
    with connect_sync(Door(2)) as queue:
        assert queue.publish_many([Task(key="k")], wait=5)[0].stored
        assert not queue.publish_many([Task(key="k")])[0].stored


class Bell:
    """A fake room signal: it records its waits and notifies only when the test sets ``rang``."""

    def __init__(self) -> None:
        self.rang = asyncio.Event()
        self.waits: list[float] = []
        self.open = 0

    async def wait(self, timeout: float) -> None:
        """Record the timeout, then wait for the notification or the timeout."""
        self.waits.append(timeout)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self.rang.wait()
        self.rang.clear()

    async def __aenter__(self) -> Self:
        """Count this signal as open."""
        self.open += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        """Count this signal as closed."""
        self.open -= 1


class BellDoor(Door):
    """A refusing backend that offers a room signal."""

    def __init__(
        self, times: float, retry_after: float | None = 60.0, code: Refusal = Refusal.QUEUE_FULL
    ) -> None:
        super().__init__(times, retry_after)
        self.capabilities = Capabilities(names=frozenset({Capability.FLOW}))
        self.signal = Bell()
        self.bells: list[set[str]] = []
        self._code = code

    def room_signal(self, *keys: str) -> Bell:
        """Record the queues for which a signal was opened, and return the one fake signal."""
        self.bells.append(set(keys))
        return self.signal

    def _refusal(self, task: Task) -> Confirmation:
        return msgspec.structs.replace(super()._refusal(task), code=self._code)


@pytest.mark.parametrize("code", [Refusal.QUEUE_FULL, Refusal.TENANT_FULL, Refusal.INTAKE_PAUSED])
@pytest.mark.parametrize("observed", [False, True])
async def test_a_room_signal_ends_the_wait(code: Refusal, *, observed: bool) -> None:
    """B13: with a room signal, a publisher does not poll.

    It retries once the signal is open, and on each notification.
    """
    door = BellDoor(3, code=code)
    queue = Queue(InstrumentedBackend(door, Hooks()) if observed else door)
    publishing = asyncio.create_task(queue.publish("k", id="t", wait=60))
    for times in (2, 3):
        while len(door.signal.waits) < times - 1:  # noqa: ASYNC110 - polls, as the conformance kit does
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        assert len(door.calls) == times
        door.signal.rang.set()
    assert (await asyncio.wait_for(publishing, 5)).stored
    assert (len(door.calls), door.bells, door.signal.open) == (4, [{"k"}], 0)
    assert all(
        60.001 > wait > 15 for wait in door.signal.waits
    )  # a little above 60, because sums of times are rounded


async def test_no_room_signal_for_accepted_publishes() -> None:
    """A publish that is accepted, or that must not or cannot wait, opens no room signal."""
    assert (await Queue(door := BellDoor(0)).publish("k", wait=5)).stored
    assert door.bells == []
    for wait, hint in ((0, 60.0), (5, None)):
        with pytest.raises(QueueFull):
            await Queue(door := BellDoor(1, hint)).publish("k", wait=wait)
        assert (len(door.calls), door.bells) == (1, [])


async def test_room_that_came_while_the_room_signal_was_opened() -> None:
    """B13: room that becomes available between the refusal and the opening of the room signal is not missed."""
    door = BellDoor(1)
    assert (await asyncio.wait_for(Queue(door).publish("k", wait=60), 5)).stored
    assert door.signal.waits == []


async def test_a_full_store_sends_no_room_signal() -> None:
    """B13: no room signal exists for a full store, so publishers retry after the suggested delay."""
    door = BellDoor(3, 0.01, Refusal.STORE_FULL)
    assert (await asyncio.wait_for(Queue(door).publish("k", wait=60), 5)).stored
    assert door.signal.waits == []


async def test_a_queue_that_moves_while_a_publisher_waits() -> None:
    """A20: if the queue moves while a publish waits, the wait ends at once with an error that says so."""
    door = BellDoor(NEVER)
    publishing = asyncio.create_task(Queue(door).publish("k", wait=60))
    while not door.signal.waits:  # noqa: ASYNC110 - polls, as the conformance kit does
        await asyncio.sleep(0)
    door._code, door._retry_after = Refusal.MOVED, None
    door.signal.rang.set()
    with pytest.raises(QueueFull) as caught:
        await asyncio.wait_for(publishing, 5)
    assert (caught.value.code, door.signal.open) == ("moved", 0)


async def test_the_timeout_is_kept_with_a_room_signal() -> None:
    """B13: without a notification, a publish ends at its timeout, after one last attempt."""
    door = BellDoor(NEVER)
    clock = LoopClock()
    start = clock.now()
    with pytest.raises(QueueFull):
        await Queue(door).publish("k", wait=0.1)
    assert 0.1 <= clock.now() - start < 0.2
    assert (len(door.calls), door.signal.open) == (3, 0)


async def test_room_signals_of_bound_queues() -> None:
    """D9, B13: publishers to a queue with bindings are notified of room in each bound queue."""
    door = BellDoor(1)
    names = {Capability.FLOW, Capability.FAN_OUT, Capability.CONTROL}
    door.capabilities = Capabilities(names=frozenset(names))

    class Control:
        async def settings(self, key: str) -> QueueSettings:
            """Return settings that bind the queue ``k`` to two others."""
            return QueueSettings(bound_to=("a", "b") if key == "k" else ())

    door.control = Control()  # type: ignore[attr-defined]
    tasks = [Task(key="k"), Task(key="other"), Task(key="k")]
    assert all(one.stored for one in await Queue(door).publish_many(tasks, wait=5))
    assert door.bells == [{"k", "a", "b", "other"}]

"""`SyncQueue`, the synchronous interface: same results, usable from any thread, and no thread left after closing."""

import asyncio
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from taskqueue_core import (
    InvalidInput,
    Ledger,
    SyncQueue,
    Task,
    TaskQueueError,
    Tasks,
    connect,
    connect_sync,
)
from taskqueue_core.errors import BackendNotFound, ConfigurationError
from taskqueue_core.queue import Queue
from taskqueue_core.tasks import Confirmation, State
from taskqueue_memory import MemoryBackend
from tests.core.fakes import ScriptedBackend, accepted


def threads() -> set[str]:
    """Return the names of all running threads."""
    return {thread.name for thread in threading.enumerate()}


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Fail the test if the background thread is still running afterwards."""
    yield
    assert "taskqueue" not in threads()


def test_the_same_answers() -> None:
    """Publishing, and reading status, result and ledger, work without an event loop."""
    with connect_sync("taskqueue_memory") as queue:
        one = queue.publish("k", {"n": 1}, priority=9)
        many = queue.publish_many([Task(key="k"), Task(key="other")])
        status = queue.status("k", one.task_id)
        assert status is not None
        assert status.state is State.WAITING
        assert queue.result("k", one.task_id) is None
        assert all(confirmation.stored for confirmation in many)
        assert queue.ledger("k") == Ledger(published=2, waiting=2)
        assert queue.ledger() == Ledger(published=3, waiting=3)


def test_every_method_has_a_twin() -> None:
    """`SyncQueue` has every public method of `Queue` that is not for other modules."""

    def methods(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert methods(SyncQueue) - {"run"} == methods(Queue) - {
        "ends",
        "instant",
        "publish_task",
        "subscribe",
        "task_of",
    }


def test_errors_come_through() -> None:
    """An error of the queue is raised in the calling thread unchanged."""
    with connect_sync("taskqueue_memory") as queue, pytest.raises(InvalidInput, match=r"^priority"):
        queue.publish("k", priority=10)


async def test_the_wrong_with() -> None:
    """U2: each connect in the wrong kind of ``with`` says what to write; nothing is opened."""
    tasks = Tasks()
    for opened, name in (
        (connect("memory"), "connect"),
        (tasks.connect("memory"), "tasks.connect"),
    ):
        with pytest.raises(ConfigurationError) as caught, opened:  # type: ignore[attr-defined]  # that is the case
            pass
        assert f"'async with {name}(...)'" in str(caught.value)
        assert f"'with {name}_sync(...)'" in str(caught.value)
        blocking = connect_sync("memory") if name == "connect" else tasks.connect_sync("memory")
        with pytest.raises(ConfigurationError) as caught:
            async with blocking:  # type: ignore[attr-defined]  # that is the case
                pass
        assert f"'with {name}_sync(...)'" in str(caught.value)
        assert f"'async with {name}(...)'" in str(caught.value)


def test_many_threads() -> None:
    """Concurrent calls from 16 threads are all executed, once each."""
    with connect_sync("taskqueue_memory") as queue, ThreadPoolExecutor(16) as pool:
        confirmations = list(pool.map(lambda n: queue.publish("k", n), range(400)))
        assert len({confirmation.task_id for confirmation in confirmations}) == 400
        assert queue.ledger() == Ledger(published=400, waiting=400)


def test_connecting_to_nothing() -> None:
    """If the backend cannot be opened, the background thread ends too."""
    with pytest.raises(BackendNotFound), connect_sync("no-such-backend"):
        pass


def test_an_error_inside() -> None:
    """If the body of the block raises, the backend is closed and the background thread ends."""
    with pytest.raises(ZeroDivisionError), connect_sync("taskqueue_memory") as queue:
        raise ZeroDivisionError
    assert not asyncio.run(queue.queue.backend.health()).ok


def test_after_the_end() -> None:
    """Calling a closed queue raises an error and does not block."""
    with connect_sync("taskqueue_memory") as queue:
        pass
    with pytest.raises(TaskQueueError, match="closed"):
        queue.publish("k")


def test_two_at_once() -> None:
    """Two connections at the same time have separate backends and do not affect each other."""
    with connect_sync("taskqueue_memory") as one, connect_sync("taskqueue_memory") as other:
        one.publish("k")
        assert other.ledger() == Ledger()


async def test_inside_a_running_loop() -> None:
    """Using the synchronous interface in a coroutine raises an error, because it would block the event loop."""
    with pytest.raises(TaskQueueError, match="use connect"), connect_sync("taskqueue_memory"):
        pass


async def test_in_a_worker_thread_of_a_loop() -> None:
    """A thread started by an event loop with ``asyncio.to_thread`` may use the synchronous interface."""

    def work() -> Ledger:
        with connect_sync("taskqueue_memory") as queue:
            queue.publish("k")
            return queue.ledger()

    assert await asyncio.to_thread(work) == Ledger(published=1, waiting=1)


class Stuck(ScriptedBackend):
    """A backend whose ``publish`` never returns."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()
        self.cancelled = threading.Event()

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        """Wait until cancelled."""
        self.asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()
        return tuple(map(accepted, tasks))


def test_closing_ends_calls_of_other_threads() -> None:
    """Closing the queue ends calls that wait in other threads, with an error."""
    backend: Any = Stuck()
    errors: list[BaseException] = []

    def publish(queue: SyncQueue) -> None:
        try:
            queue.publish("k")
        except TaskQueueError as error:
            errors.append(error)

    with connect_sync(backend) as queue:
        caller = threading.Thread(target=publish, args=(queue,))
        caller.start()
        assert backend.asked.wait(30)
    caller.join(30)
    assert not caller.is_alive()
    assert [str(error) for error in errors] == ["the queue was closed before the call ended"]
    assert backend.cancelled.is_set()


def test_an_interrupted_caller_takes_its_call_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a caller is interrupted with Ctrl-C, its call is cancelled in the background thread."""
    backend: Any = Stuck()
    future = sys.modules["concurrent.futures"].Future
    original = future.result

    def interrupted(self: Any, timeout: float | None = None) -> Any:
        if backend.asked.wait(30):
            raise KeyboardInterrupt
        return original(self, timeout)

    with connect_sync(backend) as queue:
        monkeypatch.setattr(future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            queue.publish("k")
        monkeypatch.undo()
        assert backend.cancelled.wait(30)


def test_calls_do_not_wait_for_each_other() -> None:
    """Calls from several threads run concurrently: ten publishes that wait for each other all return."""

    class Slow(ScriptedBackend):
        def __init__(self) -> None:
            super().__init__()
            self.asked = 0
            self.all_asked = asyncio.Event()

        async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
            self.asked += 1
            if self.asked == 10:
                self.all_asked.set()
            await asyncio.wait_for(self.all_asked.wait(), 30)
            return tuple(map(accepted, tasks))

    backend: Any = Slow()
    with connect_sync(backend) as queue, ThreadPoolExecutor(10) as pool:
        assert len(list(pool.map(lambda _: queue.publish("k"), range(10)))) == 10


def test_a_memory_backend_outlives_the_connection() -> None:
    """A backend object passed in by the caller stays open, and can be used for another connection."""
    backend = MemoryBackend()
    for count in (1, 2):
        with connect_sync(backend) as queue:
            queue.publish("k")
            assert queue.ledger() == Ledger(published=count, waiting=count)

"""Dependencies of handlers: when they open and close, what becomes of errors, and what is refused at import."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any
from unittest.mock import Mock

import pytest

from taskqueue_core import (
    Context,
    Depends,
    InvalidArguments,
    Queue,
    Shared,
    TaskDead,
    Tasks,
    current,
)
from taskqueue_core.application.dependencies import override
from taskqueue_core.backend import Backend
from taskqueue_core.errors import ConfigurationError
from taskqueue_core.retry import RetryPolicy
from taskqueue_memory import MemoryBackend
from taskqueue_worker import LocalWorker, Reject, Retry
from tests.application.running import OpenWorld, working
from tests.worker.fake import PATIENCE

EVENTS: list[str] = []


@pytest.fixture(autouse=True)
def _no_events() -> None:
    EVENTS.clear()


@asynccontextmanager
async def pool() -> AsyncIterator[dict[str, int]]:
    """Something that all calls share."""
    EVENTS.append("open pool")
    yield {"sessions": 0}
    EVENTS.append("close pool")


@asynccontextmanager
async def session(
    shared: dict[str, int] = Shared(pool), context: Context[Any] = current
) -> AsyncIterator[str]:
    """Something that each call has for itself."""
    shared["sessions"] += 1
    EVENTS.append(f"open {context.task_id}")
    try:
        yield f"session {shared['sessions']}"
    except BaseException as error:
        EVENTS.append(f"roll back {context.task_id}: {type(error).__name__}")
        raise
    EVENTS.append(f"close {context.task_id}")


async def user(db: str = Depends(session)) -> str:
    """Something that needs the same session as its user."""
    return f"user of {db}"


@contextmanager
def number() -> Iterator[int]:
    """A context manager that is not async."""
    yield 17


async def one_attempt(backend: Backend, *keys: str) -> None:
    """Make a failure of an attempt a dead letter."""
    for key in keys:
        settings = await backend.control.settings(key)  # type: ignore[attr-defined]
        changed = settings.model_copy(update={"retry": RetryPolicy(max_attempts=1)})
        await backend.control.configure(key, changed)  # type: ignore[attr-defined]


async def test_of_each_kind(world: OpenWorld) -> None:
    """U9: dependencies are nested, opened once per call, or once per worker, also for a handler in a thread."""
    tasks = Tasks()

    @tasks.task
    async def run(
        text: str, db: str = Depends(session), who: str = Depends(user), n: int = Depends(number)
    ) -> list[Any]:
        EVENTS.append(text)
        return [db, who, n]

    @tasks.task
    def block(text: str, *, db: str = Depends(session), who: str = Depends(user)) -> list[Any]:
        EVENTS.append(text)
        return [db, who, threading.current_thread() is threading.main_thread()]

    assert run.schema()["properties"].keys() == {"text"}
    async with world() as (backend, worker), working(worker(tasks)):
        queue = Queue(backend)
        one = await run.using(on=queue, id="a").publish("one")
        assert await one.result(PATIENCE) == ["session 1", "user of session 1", 17]
        two = await block.using(on=queue, id="b").publish("two")
        assert await two.result(PATIENCE) == ["session 2", "user of session 2", False]
        assert EVENTS == ["open pool", "open a", "one", "close a", "open b", "two", "close b"]
    assert EVENTS[-1] == "close pool"


@asynccontextmanager
async def unclosable() -> AsyncIterator[None]:
    """Fail at the end, as a commit may."""
    yield
    raise LookupError("the commit failed")


def unopenable() -> None:
    """Fail to open."""
    raise LookupError("no database")


def rejecting() -> None:
    """Say that the task cannot succeed."""
    raise Reject("closed")


@asynccontextmanager
async def suppressing() -> AsyncIterator[None]:
    """Suppress the error of the handler."""
    with suppress(LookupError):
        yield


async def test_errors() -> None:
    """U9: a dependency that cannot open or close fails the attempt; none can hide that the handler failed."""
    tasks = Tasks()
    ran: list[str] = []

    @tasks.task
    async def commit(_: None = Depends(unclosable)) -> int:
        ran.append("commit")
        return 1

    @tasks.task
    def commit_in_thread(_: None = Depends(unclosable)) -> int:
        ran.append("commit_in_thread")
        return 1

    @tasks.task
    async def connect(_: str = Depends(session), __: None = Depends(unopenable)) -> None:
        ran.append("never")

    @tasks.task
    async def reject(_: None = Depends(rejecting)) -> None:
        ran.append("never")

    @tasks.task
    async def fail(_: None = Depends(suppressing)) -> None:
        raise LookupError("failed")

    backend = MemoryBackend()
    await one_attempt(backend, *tasks.functions)
    async with tasks.connect(Queue(backend)), working(LocalWorker(tasks, backend=backend)):
        for task, reason, error in (
            (commit, "max_attempts", "LookupError: the commit failed"),
            (commit_in_thread, "max_attempts", "LookupError: the commit failed"),
            (connect, "max_attempts", "LookupError: no database"),
            (fail, "max_attempts", "LookupError: failed"),
            (reject, "closed", None),
        ):
            handle = await task.using(id="x").publish()
            with pytest.raises(TaskDead) as caught:
                await handle.result(PATIENCE)
            assert caught.value.reason.startswith(reason) or error
            (letter,) = await backend.dead_letters.list(task.name)
            if error is not None:
                assert letter.history[-1].error == error
    assert ran == ["commit", "commit_in_thread"]
    assert EVENTS == ["open pool", "open x", "roll back x: LookupError", "close pool"]


async def test_a_retry_that_is_raised_or_returned() -> None:
    """U9: a dependency sees a raised `Retry` as an error, and a returned one as an ordinary end."""
    tasks = Tasks()

    @tasks.task
    async def run(context: Context[Any], db: str = Depends(session)) -> Any:
        if context.attempt == 1:
            raise Retry(0)
        return Retry(0) if context.attempt == 2 else db

    backend = MemoryBackend()
    async with tasks.connect(Queue(backend)), working(LocalWorker(tasks, backend=backend)):
        handle = await run.using(id="a").publish()
        assert await handle.result(PATIENCE) == "session 3"
    ends = [event for event in EVENTS if event.startswith(("roll", "close a"))]
    assert ends == ["roll back a: Retry", "close a", "close a"]


async def test_a_timeout_in_a_thread() -> None:
    """U9: the dependencies of a synchronous handler stay open until it returns, although its attempt has failed."""
    tasks = Tasks()
    release = threading.Event()

    @tasks.task(timeout=0.01)
    def block(_: str = Depends(session)) -> None:
        release.wait(PATIENCE)
        EVENTS.append("returned")

    backend = MemoryBackend()
    await one_attempt(backend, "block")
    async with tasks.connect(Queue(backend)), working(LocalWorker(tasks, backend=backend)):
        handle = await block.using(id="a").publish()
        with pytest.raises(TaskDead):
            await handle.result(PATIENCE)
        assert EVENTS == ["open pool", "open a"]
        release.set()
    assert EVENTS[2:] == ["returned", "roll back a: CancelledError", "close pool"]


async def test_a_worker_that_stops() -> None:
    """U9: after the grace period, dependencies close although a synchronous handler has not returned."""
    tasks = Tasks()
    release = threading.Event()
    started = asyncio.Event()
    loop = asyncio.get_running_loop()

    @tasks.task
    def block(_: str = Depends(session)) -> None:
        loop.call_soon_threadsafe(started.set)
        release.wait(PATIENCE)

    backend = MemoryBackend()
    async with tasks.connect(Queue(backend)) as queue:
        async with working(LocalWorker(tasks, backend=backend, grace=0)):
            await block.using(id="a").publish()
            await started.wait()
        assert (await queue.ledger()).waiting == 1
    release.set()
    assert EVENTS[2:] == ["roll back a: CancelledError", "close pool"]


async def test_batches() -> None:
    """U9: one call of a batch handler has its dependencies once."""
    tasks = Tasks()

    @tasks.task(batch=10)
    async def many(numbers: list[int], n: int = Depends(number)) -> list[int]:
        return [each + n for each in numbers]

    backend = MemoryBackend()
    async with tasks.connect(Queue(backend)) as queue, working(LocalWorker(tasks, backend=backend)):
        handle = await many.publish([1])
        await queue.ends.wait("many", handle.id, wait_for_redrive=False)
        assert await queue.result("many", handle.id) == 18


def test_they_are_no_arguments() -> None:
    """U9: a publish cannot pass a dependency, and arguments behind one are passed by name."""
    tasks = Tasks()

    @tasks.task
    async def run(text: str, db: str = Depends(session), more: int = 0, **others: int) -> str:
        return f"{text} {db} {more} {others}"

    with pytest.raises(InvalidArguments, match="db is a dependency, which the worker provides"):
        run.call("x", db="y")
    with pytest.raises(InvalidArguments, match="too many positional arguments"):
        run.call("x", "y")
    assert run.call("x", more=3).payload == b'{"text":"x","more":3}'
    with pytest.raises(InvalidArguments, match="db is a dependency: pass it to a direct call"):
        asyncio.run(run("x"))
    assert asyncio.run(run("x", db="y")) == "x y 0 {}"


async def test_a_payload_provides_no_dependency() -> None:
    """U9: a payload that was written elsewhere cannot replace a dependency."""
    tasks = Tasks()

    @tasks.task
    async def run(db: str = Depends(session), **others: Any) -> list[Any]:
        return [db, others]

    backend = MemoryBackend()
    queue = Queue(backend)
    async with tasks.connect(queue), working(LocalWorker(tasks, backend=backend)):
        confirmation = await queue.publish("run", {"db": "mine", "x": 1})
        result = await run.handle(confirmation.task_id).result(PATIENCE)
    assert result == ["session 1", {"x": 1}]


async def test_overrides() -> None:
    """U9: a test replaces a dependency, also one of another dependency, by a value or by a function."""
    tasks = Tasks()

    @tasks.task
    async def run(who: str = Depends(user)) -> str:
        return who

    def fake() -> str:
        return "fake session"

    def wrapper(db: str = Depends(session)) -> str:
        return db

    backend = MemoryBackend()
    async with tasks.connect(Queue(backend)), working(LocalWorker(tasks, backend=backend)):
        with override(session, fake):
            assert await (await run.publish()).result(PATIENCE) == "user of fake session"
            with override(user, "somebody"):
                assert await (await run.publish()).result(PATIENCE) == "somebody"
            with override(pool, Mock()):
                assert await (await run.publish()).result(PATIENCE) == "user of fake session"
        assert await (await run.publish()).result(PATIENCE) == "user of session 1"
    with pytest.raises(ConfigurationError, match="cycle"), override(session, wrapper):
        pass
    with pytest.raises(ConfigurationError, match="got a str"), override("session", fake):  # type: ignore[arg-type]
        pass
    with override(session, fake):
        pass


def test_publishers_import_nothing_for_them() -> None:
    """U9: the library is imported with the first worker that needs it, and not by publishers."""
    code = (
        "import sys\n"
        "from taskqueue_core import Depends, Tasks\n"
        "def db() -> int: return 1\n"
        "tasks = Tasks()\n"
        "@tasks.task\n"
        "def run(n: int, db: int = Depends(db)) -> None: ...\n"
        "run.call(1)\n"
        "sys.exit('uncalled_for' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

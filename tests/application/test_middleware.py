"""Middleware around each publish and each run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from taskqueue_core import (
    Call,
    Confirmation,
    Context,
    Depends,
    Middleware,
    Queue,
    QueueFull,
    TaskDead,
    Tasks,
)
from taskqueue_core.application.task_function import SCHEMA_HEADER
from taskqueue_core.errors import ConfigurationError
from taskqueue_core.tasks import Published, Task
from taskqueue_memory import MemoryBackend
from taskqueue_worker import LocalWorker, Reject, Retry
from tests.application.running import OpenWorld, working
from tests.worker.fake import PATIENCE

Send = Callable[[Call[Any]], Awaitable[Confirmation]]
Handle = Callable[[], Awaitable[Any]]


class Noting(Middleware):
    """Note what passes, and add a header."""

    def __init__(self, name: str, events: list[str]) -> None:
        """Write to ``events``."""
        self.name = name
        self.events = events

    async def publish(self, call: Call[Any], send: Send) -> Confirmation:
        """Add a header."""
        self.events.append(f"{self.name} publishes")
        headers = {**call.options.get("headers", {}), self.name: "1"}
        confirmation = await send(call.using(headers=headers))
        self.events.append(f"{self.name} published {confirmation.status}")
        return confirmation

    async def run(self, context: Context, handle: Handle) -> Any:
        """Note the run."""
        self.events.append(f"{self.name} runs {context.task_id}")
        try:
            result = await handle()
        except BaseException as error:
            self.events.append(f"{self.name} {type(error).__name__}")
            raise
        self.events.append(f"{self.name} ran: {result}")
        return result


async def test_the_order_on_both_ends(world: OpenWorld) -> None:
    """U9: the first middleware is the outermost, also of included registries, for threads and coroutines alike."""
    events: list[str] = []
    app = Tasks(middleware=[Noting("a", events), Noting("b", events)])
    mail = Tasks(prefix="mail.", middleware=[Noting("c", events)])
    app.include(mail)

    @asynccontextmanager
    async def session() -> AsyncIterator[str]:
        events.append("open")
        yield "db"
        events.append("close")

    @mail.task
    async def send(context: Context, db: str = Depends(session)) -> str:
        events.append("handler")
        return db + "".join(sorted(context.headers.keys() - {SCHEMA_HEADER}))

    @app.task
    def block(context: Context) -> str:
        return "".join(sorted(context.headers.keys() - {SCHEMA_HEADER}))

    async with world() as (backend, worker):
        queue = Queue(backend)
        handle = await send.using(on=queue, id="x", headers={"z": "1"}).publish()
        assert events == [
            *("a publishes", "b publishes", "c publishes"),
            *("c published accepted", "b published accepted", "a published accepted"),
        ]
        events.clear()
        async with working(worker(app)):
            assert await handle.result(PATIENCE) == "dbabcz"
            assert events == [
                *("a runs x", "b runs x", "c runs x", "open", "handler", "close"),
                *("c ran: dbabcz", "b ran: dbabcz", "a ran: dbabcz"),
            ]
            other = await block.using(on=queue).publish()
            assert await other.result(PATIENCE) == "ab"


def test_blocking_publishes() -> None:
    """U9: blocking publishes pass the middleware, too."""
    events: list[str] = []
    tasks = Tasks(middleware=[Noting("a", events)])

    @tasks.task
    def run(n: int) -> None: ...

    with tasks.connect_sync("taskqueue_memory"):
        run.publish_sync(1)
        tasks.publish_many_sync([run.call(2), run.call(3)])
    assert events.count("a publishes") == events.count("a published accepted") == 3


async def test_calls_that_are_sent_together() -> None:
    """U9: `publish_many` passes each call, but sends them in batches; what one middleware raises is raised."""
    refused: set[int] = set()
    sent: list[int] = []

    class Repeating(Middleware):
        async def publish(self, call: Call[Any], send: Send) -> Confirmation:
            number = int(call.payload.decode().strip('{}n":'))
            if number in refused:
                raise LookupError(str(number))
            first = await send(call.using(id=f"t{number}"))
            return await send(call.using(id=f"t{number}")) if number % 2 else first

    tasks = Tasks(middleware=[Repeating()])

    @tasks.task
    def run(n: int) -> None: ...

    backend = MemoryBackend()
    publish = backend.publisher.publish

    async def count(*batch: Task) -> tuple[Confirmation, ...]:
        sent.append(len(batch))
        return await publish(*batch)

    backend.publisher.publish = count  # type: ignore[method-assign]
    async with tasks.connect(Queue(backend)):
        handles = await tasks.publish_many([run.call(n) for n in range(10)])
        statuses = [handle.confirmation and handle.confirmation.status for handle in handles]
        assert statuses == [Published.ACCEPTED, Published.DUPLICATE] * 5
        assert [handle.id for handle in handles] == [f"t{n}" for n in range(10)]
        assert sent == [10, 5]
        refused.add(11)
        with pytest.raises(LookupError, match="11"):
            await tasks.publish_many([run.call(n) for n in (10, 11, 12)])
        assert sent == [10, 5, 2]
        await tasks.publish_many([])


async def test_a_refused_publish() -> None:
    """U9: middleware gets the confirmation of a refused task, and the publisher the error."""
    events: list[str] = []
    tasks = Tasks(middleware=[Noting("a", events)])

    @tasks.task
    def run() -> None: ...

    backend = MemoryBackend()
    settings = await backend.control.settings("run")
    await backend.control.configure("run", settings.model_copy(update={"capacity": 1}))
    async with tasks.connect(Queue(backend)):
        await run.publish()
        with pytest.raises(QueueFull):
            await run.publish()
        (handle,) = await tasks.publish_many([run.call()])
        assert handle.confirmation is not None
        assert not handle.confirmation.stored
    assert events.count("a published refused") == 2


async def test_what_middleware_returns_and_raises() -> None:
    """U9: what middleware returns or raises counts as what the handler returned or raised."""
    calls: list[int] = []

    class Deciding(Middleware):
        async def run(self, context: Context, handle: Handle) -> Any:
            if "skip" in context.headers:
                return 17
            if "reject" in context.headers:
                raise Reject("unwanted")
            if context.attempt == 1:
                raise Retry(0)
            return await handle() + await handle()

    tasks = Tasks(middleware=[Deciding()])

    @tasks.task
    async def run() -> int:
        calls.append(1)
        return len(calls)

    backend = MemoryBackend()
    async with tasks.connect(Queue(backend)), working(LocalWorker(tasks, backend=backend)):
        assert await (await run.using(headers={"skip": ""}).publish()).result(PATIENCE) == 17
        with pytest.raises(TaskDead, match="unwanted"):
            await (await run.using(headers={"reject": ""}).publish()).result(PATIENCE)
        assert await (await run.publish()).result(PATIENCE) == 3


async def test_a_cancelled_publish() -> None:
    """U9: a publish that is cancelled leaves nothing running."""

    class Hanging(Middleware):
        async def publish(self, call: Call[Any], send: Send) -> Confirmation:
            started.set()
            await asyncio.sleep(3600)
            return await send(call)

    started = asyncio.Event()
    tasks = Tasks(middleware=[Hanging()])

    @tasks.task
    def run() -> None: ...

    before = asyncio.all_tasks()
    async with tasks.connect(Queue(MemoryBackend())):
        publishing = asyncio.create_task(tasks.publish_many([run.call(), run.call()]))
        await started.wait()
        publishing.cancel()
        await asyncio.wait([publishing])
    assert asyncio.all_tasks() == before


async def test_wrong_middleware() -> None:
    """U9: a class instead of an object, other objects, and a lost confirmation are named."""

    class Lost(Middleware):
        async def publish(self, call: Call[Any], send: Send) -> Confirmation:
            await send(call)
            return None  # type: ignore[return-value]  # that is the case

    wrong: list[tuple[Any, str]] = [
        (Lost, r"got Lost; expected objects.*as in \[Lost\(\)\]"),
        (3, "got int; expected objects of subclasses of Middleware"),
    ]
    for middleware, fault in wrong:
        with pytest.raises(ConfigurationError, match=fault):
            Tasks(middleware=[middleware])
    tasks = Tasks(middleware=[Lost()])

    @tasks.task
    def run() -> None: ...

    async with tasks.connect(Queue(MemoryBackend())):
        with pytest.raises(ConfigurationError, match=r"Lost\.publish returned a NoneType"):
            await run.publish()


async def test_middleware_of_a_registry_that_is_included_twice() -> None:
    """U9: middleware runs once, also if two paths lead to its registry, or it is included twice."""
    seen: list[str] = []

    class Named(Middleware):
        def __init__(self, name: str) -> None:
            self.name = name

        async def publish(self, call: Any, send: Any) -> Any:
            seen.append(self.name)
            return await send(call)

    outer, inner, core = (Tasks(middleware=[Named(name)]) for name in ("outer", "inner", "core"))

    @core.task
    async def work() -> None:
        """Do nothing."""

    inner.include(core)
    inner.include(core)
    outer.include(inner, core)
    async with outer.connect(Queue(MemoryBackend())):
        await work.publish()
    assert sorted(seen) == ["core", "inner", "outer"]
    assert seen[-1] == "core"

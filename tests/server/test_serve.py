"""Start of the server: its address, plugins, connection registry, maintenance and logs."""

from __future__ import annotations

import asyncio
import io
import logging
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from taskqueue_core.capabilities import Maintained
from taskqueue_core.concurrency import Interruptible, first_completed, wait_forever
from taskqueue_core.consumer import maintenance
from taskqueue_core.consumer.maintenance import run_passes
from taskqueue_core.errors import BackendUnavailable, ConfigurationError
from taskqueue_core.hooks import Connection, Hooks, hookimpl
from taskqueue_core.instrumented import InstrumentedBackend
from taskqueue_core.logs import FIELDS, set_up_logs
from taskqueue_core.tasks import Expired
from taskqueue_memory import MemoryBackend
from taskqueue_server import ServerProcess, serve
from taskqueue_server.context.connections import Connections
from tests.server.support import eventually, http, running, settings


class TestAddress:
    """Without authentication, the server listens on loopback addresses only."""

    @pytest.mark.parametrize(
        "host",
        [
            "0.0.0.0",  # noqa: S104 - the server refuses to bind it
            "::",
            "192.168.1.1",
            "example.org",
            "",
            "127.0.0.1.example.org",
            "::ffff:1.2.3.4",
        ],
    )
    def test_no_other_host(self, host: str) -> None:
        """An address that other machines could reach is refused before the server listens."""
        with pytest.raises(ConfigurationError, match="loopback only"):
            ServerProcess(MemoryBackend(), settings(host=host))
        with pytest.raises(ConfigurationError, match="loopback only"):
            serve(settings(host=host), "taskqueue_memory")

    @pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.0.0.9"])
    async def test_any_free_port(self, host: str) -> None:
        """With port 0 the server chooses a free port and reports the actual one in its URL."""
        try:
            async with running(host=host) as it, http(it) as client:
                assert (await client.get("/ready")).status_code == 200
                assert not it.server.url.endswith(":0")
        except ConfigurationError:
            assert host == "::1", "only IPv6 may be unavailable"

    async def test_a_port_that_is_taken(self) -> None:
        """If the port is in use, the error names the setting to change, and the backend is closed."""
        closed = asyncio.Event()

        class Backend(MemoryBackend):
            async def aclose(self) -> None:
                await super().aclose()
                closed.set()

        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            server = ServerProcess(Backend(), settings(port=port))
            with pytest.raises(ConfigurationError, match="TASKQUEUE_PORT"):
                await server.run()
        assert closed.is_set()

    async def test_stopping_while_the_store_is_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A server that is stopped before it listens ends, and never reports that it is ready."""
        backend, answer = MemoryBackend(), asyncio.Event()

        async def queues() -> tuple[str, ...]:
            await answer.wait()
            return ()

        monkeypatch.setattr(backend.control, "queues", queues)
        server = ServerProcess(backend, settings())
        task = asyncio.create_task(server.run())
        await asyncio.sleep(0.01)
        server.stop()
        answer.set()
        await asyncio.wait_for(task, 5)
        assert not server.ready.is_set()

    async def test_on_ready_is_called_once_it_answers(self) -> None:
        """``on_ready`` is called once the server accepts connections, not before."""
        told: list[str] = []

        def ready(url: str) -> None:
            host, port = url.removeprefix("http://").rsplit(":", 1)
            with socket.create_connection((host, int(port)), 1):
                told.append(url)

        server = ServerProcess(MemoryBackend(), settings(), on_ready=ready)
        task = asyncio.create_task(server.run())
        await eventually(lambda: told)
        assert told == [server.url]
        server.stop()
        await task


class TestHooks:
    """Plugins are notified when workers connect and disconnect."""

    async def test_connected_and_disconnected(self) -> None:
        """A plugin is notified of each welcomed connection once at its start and once at its end, with the reason."""
        seen: list[tuple[str, str, tuple[str, ...], str]] = []

        class Plugin:
            @hookimpl
            def worker_connected(self, connection: Connection) -> None:
                seen.append(("+", connection.worker_id, connection.keys, ""))

            @hookimpl
            def worker_disconnected(self, connection: Connection, reason: str) -> None:
                seen.append(("-", connection.worker_id, connection.keys, reason))

        hooks = Hooks()
        hooks.register(Plugin())
        async with running(InstrumentedBackend(MemoryBackend(), hooks)) as it:
            async with it.worker("w", "b", "a", "b") as worker:
                assert seen == [("+", "w", ("b", "a"), "")]
                await worker.send("bye")
                await worker.closed()
            await eventually(lambda: len(seen) == 2)
            assert seen[1] == ("-", "w", ("b", "a"), "bye")
            async with it.socket():
                pass
            await eventually(lambda: len(it.context.registry) == 0)
            assert len(seen) == 2


class TestRegistry:
    """REV-E5 and fault G6: connections are counted per worker and removed one by one."""

    class Member:
        """A connection that records which receipts it has to forget."""

        def __init__(self, connection_id: str, worker_id: str | None = None) -> None:
            self.connection_id = connection_id
            self.worker_id = worker_id
            self.forgotten: list[str] = []

        def forget(self, receipts: Any) -> None:
            """Record the receipts."""
            self.forgotten += receipts

    def test_removing_one_touches_no_other(self) -> None:
        """Removing a connection, even twice, does not affect another connection of the same worker."""
        registry = Connections()
        one, two = self.Member("1", "w"), self.Member("2", "w")
        for member in (one, two):
            registry.add(member)
            registry.identify(member, "w")
        registry.remove(one)
        registry.remove(one)
        assert (len(registry), registry.connections("w")) == (1, 1)
        registry.remove(two)
        assert (len(registry), registry.connections("w")) == (0, 0)

    def test_receipts_are_claimed_from_the_same_worker_only(self) -> None:
        """Claimed receipts are taken from other connections of the same worker only."""
        registry = Connections()
        mine, old, other = self.Member("1", "w"), self.Member("2", "w"), self.Member("3", "x")
        for member in (mine, old, other):
            registry.add(member)
            registry.identify(member, str(member.worker_id))
        registry.claim(mine, "w", ["a", "b"])
        assert (mine.forgotten, old.forgotten, other.forgotten) == ([], ["a", "b"], [])

    async def test_room(self) -> None:
        """Fault G11: the number of connections and the number of connections without a hello are limited."""
        registry = Connections(max_connections=3, max_strangers=2)
        members = [self.Member(str(n), "w") for n in range(3)]
        registry.add(members[0])
        registry.add(members[1])
        assert not registry.has_room_for(known=False)
        registry.identify(members[0], "w")
        seen = [registry.has_room_for(known=False)]
        registry.add(members[2])
        registry.identify(members[1], "w")
        seen.append(registry.has_room_for(known=False))
        assert seen == [True, False]
        waiting = asyncio.create_task(registry.empty())
        for member in members:
            registry.remove(member)
        await asyncio.wait_for(waiting, 1)


class TestMaintenance:
    """Law 10: the maintenance loop continues after any failure."""

    @pytest.fixture(autouse=True)
    def _quick(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(maintenance, "_EVERY", 0.005)
        monkeypatch.setattr(maintenance, "_PASS_SECONDS", 0.02)

    async def test_it_survives_everything(self, caplog: pytest.LogCaptureFixture) -> None:
        """An outage, an exception and a pass that hangs are logged, and the next pass still runs."""
        passes = 0

        class Control:
            async def maintain(self) -> Maintained:
                nonlocal passes
                passes += 1
                match passes:
                    case 1 | 2:
                        raise BackendUnavailable("away")
                    case 4:
                        raise ZeroDivisionError
                    case 6:
                        await asyncio.sleep(10)
                    case 8:
                        return Maintained(expired=(Expired("k", "a", 1),), recovered=2)
                return Maintained()

        control: Any = Control()
        with caplog.at_level(logging.INFO, "taskqueue"):
            task = asyncio.create_task(run_passes(control))
            await eventually(lambda: passes >= 9)
            task.cancel()
            await asyncio.wait([task])
        warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert [getattr(record, "code", None) for record in warnings] == [
            "backend_unavailable",
            None,
            "timeout",
        ]
        assert getattr(warnings[0], "reason", "") == "away", "the backend's message is missing"
        assert any(getattr(record, "recovered", 0) == 2 for record in caplog.records)

    async def test_unavailable_at_the_start(self, caplog: pytest.LogCaptureFixture) -> None:
        """If the store is unavailable at the start, the log has the backend's own message (G6)."""
        backend = MemoryBackend()

        async def fail() -> tuple[str, ...]:
            raise BackendUnavailable("the disk of my store is full")

        backend.control.queues = fail  # type: ignore[method-assign]
        with caplog.at_level(logging.WARNING):
            async with running(backend):
                pass
        (record,) = [r for r in caplog.records if r.msg == "the store does not respond yet"]
        assert vars(record)["reason"] == "the disk of my store is full"

    async def test_it_continues_while_work_is_left(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Law 10, issue 21: a pass that left work is followed by the next one, and a growing delay is logged once."""
        answers = [
            Maintained(recovered=2, behind=40.0, again_in=0.001),
            Maintained(recovered=3, behind=50.0, again_in=0.001, unclaimed=("k",)),
            Maintained(recovered=1, behind=5.0, again_in=0.0),
            Maintained(behind=31.0, again_in=0.001, unclaimed=("k",)),
            Maintained(),
        ]
        left = answers.copy()

        class Control:
            async def maintain(self) -> Maintained:
                monkeypatch.setattr(maintenance, "_EVERY", 3600.0)
                return left.pop(0)

        control: Any = Control()
        with caplog.at_level(logging.INFO, "taskqueue"):
            task = asyncio.create_task(run_passes(control))
            await eventually(lambda: not left)
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        said = [(r.message, getattr(r, "seconds", None)) for r in caplog.records]
        late = "maintenance does not keep up"
        assert said == [(late, 40), (late, 31), ("maintenance finished", None)]
        assert caplog.records[-1].__dict__["recovered"] == 6

    async def test_a_running_server_runs_maintenance(self) -> None:
        """Tasks past their deadline expire on a running server without any request."""
        async with running() as it:
            await it.publish("a", deadline=it.backend.now() + 0.05)
            await it.reaches(expired=1)


class TestLogs:
    """Log lines contain only known fields."""

    @pytest.fixture
    def lines(self) -> Iterator[io.StringIO]:
        """The log output, on a root logger without handlers, as in a program before it sets up logging."""
        root, ours, program = map(logging.getLogger, (None, "taskqueue", "uvicorn"))
        before = [(log, log.handlers[:], log.level, log.propagate) for log in (root, ours, program)]
        root.handlers[:] = ours.handlers[:] = []
        stream = io.StringIO()
        set_up_logs(stream)
        yield stream
        for log, handlers, level, propagate in before:
            log.handlers[:] = handlers
            log.setLevel(level)
            log.propagate = propagate

    def test_fields_on_the_list_only(self, lines: io.StringIO) -> None:
        """A token or payload that is passed to a log call by mistake is not written."""
        log = logging.getLogger("taskqueue.server.test")
        log.info("hello", extra={"worker_id": "w", "token": "s3cret", "payload": "s3cret"})
        assert "worker_id='w'" in lines.getvalue()
        assert "s3cret" not in lines.getvalue()
        assert not {"token", "payload", "error", "message"} & FIELDS

    def test_what_was_set_up_before_stays(self, lines: io.StringIO) -> None:
        """A program that has set up logging before keeps its own handlers."""
        set_up_logs(io.StringIO())
        logging.getLogger("taskqueue").warning("once")
        assert lines.getvalue().count("once") == 1


async def _waits(ended: list[str], name: str) -> str:
    """Wait until cancelled, and note that."""
    try:
        return await wait_forever()
    finally:
        ended.append(name)


class TestRacing:
    """`first_completed` and `Interruptible`, which end calls early."""

    async def test_the_first_counts_and_the_others_are_cancelled(self) -> None:
        """The first result or exception is returned, and the other coroutines are cancelled.

        If the call itself is cancelled, so are all its coroutines.
        """
        ended: list[str] = []
        waits = partial(_waits, ended)

        async def fails() -> str:
            raise ZeroDivisionError

        assert await first_completed(waits("a"), asyncio.sleep(0, "b"), waits("c")) == "b"
        assert ended == ["a", "c"]
        with pytest.raises(ZeroDivisionError):
            await first_completed(waits("d"), fails())
        assert ended == ["a", "c", "d"]
        outer = asyncio.create_task(first_completed(waits("e"), waits("f")))
        await asyncio.sleep(0.01)
        outer.cancel()
        await asyncio.wait([outer])
        assert outer.cancelled()
        assert ended[3:] == ["e", "f"]

    async def test_calls_end_when_an_event_is_set(self) -> None:
        """Each call runs until it ends or one of the events is set, and no task is left after the block.

        A `TimeoutError` of a call itself is raised.
        """
        before, one, other = asyncio.all_tasks(), asyncio.Event(), asyncio.Event()
        ended: list[str] = []
        waits = partial(_waits, ended)

        async def fails() -> str:
            raise TimeoutError

        async with Interruptible(one, other) as calls:
            assert await calls.make(asyncio.sleep(0, "a")) == "a"
            with pytest.raises(TimeoutError):
                await calls.make(fails())
            asyncio.get_running_loop().call_later(0.01, other.set)
            assert await calls.make(waits("b")) is None
            one.set()
            assert await calls.make(waits("c")) is None
            assert ended == ["b", "c"]
        async with Interruptible(one) as calls:
            assert await calls.make(asyncio.sleep(0, "d")) is None
        assert asyncio.all_tasks() == before

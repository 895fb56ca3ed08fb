"""Tests of how the server closes connections to Prefect workers, and of outages of the store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosedError

from taskqueue_core.consumer import outage
from taskqueue_core.retry import RetryPolicy
from taskqueue_core.tasks import Received, State
from taskqueue_memory import MemoryBackend
from taskqueue_server.prefect import delivery
from taskqueue_server.worker_socket.websocket import WebSocketChannel
from tests.prefect.support import KEY, Taker, publish_runs, status, untouched, url_of
from tests.server.access import entry, write
from tests.server.flaky import Flaky, Plain
from tests.server.support import SECONDS, eventually, running

NEVER = 60.0
"""a timeout in seconds that no test must reach"""


class Slow(MemoryBackend):
    """A memory backend whose deliveries are held back until the event ``go_on`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.given, self.go_on = asyncio.Event(), asyncio.Event()

    def subscribe(self, keys: Iterable[str], consumer: str) -> Any:
        """Return a subscription that holds back its deliveries."""
        subscription = super().subscribe(keys, consumer)
        ask = subscription.receive

        async def receive(limit: int, timeout: float | None) -> Received:
            received = await ask(limit, timeout)
            self.given.set()
            await self.go_on.wait()
            return received

        subscription.receive = receive  # type: ignore[method-assign]
        return subscription


class TestEnds:
    """How the server closes connections: never with 1000 or 1001, because Prefect workers would end."""

    async def test_idle_workers_are_sent_to_another_server(self) -> None:
        """Fault A7: when the server stops, an idle worker's connection is closed at once with code 1012."""
        async with running(drain=NEVER) as it, Taker(url_of(it)) as worker:
            await eventually(lambda: it.context.registry.connections("host-1"))
            it.server.stop()
            assert (await worker.closed())[0] == 1012

    async def test_what_has_no_ack_goes_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Fault A7, law 3: a run without an ack is returned to the queue, and delays the server's end only briefly."""
        monkeypatch.setattr(delivery, "_ACK_SECONDS", 0.1)
        async with running(drain=NEVER) as it, Taker(url_of(it)) as worker:
            await publish_runs(it, "a", "b")
            await worker.receive()
            it.server.stop()
            assert (await worker.closed())[0] == 1012
            assert it.ended
            await asyncio.wait_for(it.ended, SECONDS)
            await untouched(it)
            assert (await it.ledger(KEY)).waiting == 2

    async def test_an_ack_in_time_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Fault A7: an ack that arrives while the server is stopping counts, and no further run is sent."""
        monkeypatch.setattr(delivery, "_ACK_SECONDS", NEVER)
        async with running(drain=NEVER) as it, Taker(url_of(it)) as worker:
            await publish_runs(it, "a", "b")
            await worker.receive()
            it.server.stop()
            await it.context.draining.wait()
            await worker.ack()
            assert (await worker.closed())[0] == 1012
            assert it.ended
            await asyncio.wait_for(it.ended, SECONDS)
            ledger = await it.ledger(KEY)
            assert (ledger.done, ledger.waiting) == (1, 1)

    async def test_nothing_is_sent_to_who_is_about_to_be_sent_away(self) -> None:
        """Fault A7, law 3: a run that is received after the server has begun to stop is returned without being sent."""
        backend = Slow()
        async with running(backend, drain=NEVER) as it, Taker(url_of(it)) as worker:
            await publish_runs(it, "a")
            await backend.given.wait()
            it.context.draining.set()
            backend.go_on.set()
            with pytest.raises(ConnectionClosedError):
                await worker.receive()
            assert worker.socket.close_code == 1012
            await untouched(it)

    async def test_an_ack_in_time_counts_for_who_is_dismissed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Security 6, fault A7: a worker whose token is revoked is sent nothing more, but its last ack counts."""
        monkeypatch.setattr(delivery, "_ACK_SECONDS", NEVER)
        token = "tq_soon-taken-back"
        path = write(tmp_path / "tokens.toml", entry(token))
        async with running(tokens_file=path) as it, Taker(url_of(it), token=token) as worker:
            await publish_runs(it, "a", "b")
            await worker.receive()
            write(path)
            await it.context.access.reload()
            await asyncio.sleep(0)
            await worker.ack()
            with pytest.raises(ConnectionClosedError):
                await worker.receive()
            assert worker.socket.close_code == 1008
            await it.reaches(KEY, done=1, waiting=1, in_flight=0)

    async def test_the_farewell_is_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Fault A7: a connection ends with a complete closing handshake, so that the close code is not lost."""
        broken: list[WebSocketChannel] = []

        def abort(channel: WebSocketChannel) -> None:
            broken.append(channel)

        monkeypatch.setattr(WebSocketChannel, "abort", abort)
        async with running(drain=NEVER) as it, Taker(url_of(it)) as worker:
            await publish_runs(it, "a")
            await worker.receive()
            await worker.send("quit")
            assert (await worker.closed())[0] == 4000
            await eventually(lambda: len(it.context.registry) == 0)
        assert not broken

    async def test_a_cancelled_task_is_taken_away(self) -> None:
        """If a run is cancelled before its ack, the worker is disconnected with code 1012 so that it drops the run."""
        async with running() as it, Taker(url_of(it)) as worker:
            await publish_runs(it, "a")
            await worker.receive()
            assert await it.context.control.cancel(KEY, "a")
            assert await worker.closed() == (1012, "revoked")
            assert (await status(it)).state is State.CANCELLED

    async def test_an_ack_that_comes_too_late(self, caplog: pytest.LogCaptureFixture) -> None:
        """Law 2: a late ack changes nothing and is logged, and the worker gets the next run."""
        async with running(Plain()) as it, Taker(url_of(it)) as worker:
            await publish_runs(it, "a", "b")
            await worker.receive()
            assert await it.context.control.cancel(KEY, "a")
            await worker.ack()
            assert await worker.take(1) == ["b"]
            await it.reaches(KEY, cancelled=1, done=1)
        assert "an ack came too late" in caplog.text

    async def test_a_fault_of_ours(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """An unexpected error closes the connection of one worker, and of no other."""
        async with running() as it, Taker(url_of(it), "other-1") as other:
            async with Taker(url_of(it)) as worker:
                with monkeypatch.context() as patch:
                    patch.setattr(delivery, "refusal", lambda _: 1 / 0)
                    await publish_runs(it, "a")
                    assert (await worker.closed())[0] == 1011
                await untouched(it)
            await publish_runs(it, "b", key="other-1")
            assert await other.take(1) == ["b"]
        assert "ZeroDivisionError" in caplog.text


class TestOutages:
    """Fault G14: the store is unavailable for a while."""

    async def test_workers_wait(self) -> None:
        """Fault G14: workers stay connected during an outage, and get runs afterwards."""
        backend = Flaky()
        async with running(backend) as it, Taker(url_of(it)) as worker:
            await eventually(lambda: "receive" in backend.calls)
            backend.down.set()
            await eventually(lambda: backend.calls.count("receive") > 1)
            backend.down.clear()
            await publish_runs(it, "a")
            assert await worker.take(1) == ["a"]
            await it.reaches(KEY, done=1)

    @pytest.mark.parametrize("then", ["stays", "leaves"])
    async def test_an_ack_is_settled_when_it_is_back(self, then: str) -> None:
        """D1: an ack that arrives during an outage is settled afterwards, even if the worker has disconnected."""
        backend = Flaky()
        async with running(backend) as it, Taker(url_of(it)) as worker:
            await publish_runs(it, "a")
            await worker.receive()
            backend.down.set()
            await worker.ack()
            await eventually(lambda: "ack" in backend.calls)
            if then == "leaves":
                worker.socket.transport.abort()
                await asyncio.sleep(0.05)
            backend.down.clear()
            await it.reaches(KEY, done=1)

    async def test_a_store_that_stays_away_holds_nothing_up(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Fault A7: a server that stops does not wait for an unavailable store."""
        backend = Flaky()
        monkeypatch.setattr(delivery, "_SETTLE_SECONDS", 0.1)
        monkeypatch.setattr(outage, "OUTAGE_BACKOFF", RetryPolicy(base=0.01, cap=0.01))
        async with running(backend, drain=0.3) as it, Taker(url_of(it)) as worker:
            await publish_runs(it, "a")
            await worker.receive()
            backend.down.set()
            await worker.ack()
            await eventually(lambda: "ack" in backend.calls)
            it.server.stop()
            assert (await worker.closed())[0] == 1012
            assert it.ended
            await asyncio.wait_for(it.ended, SECONDS)
        assert "Exception in ASGI application" not in caplog.text

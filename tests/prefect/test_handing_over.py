"""Tests of sending task runs to Prefect workers one after the other, and of unexpected answers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import pytest

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.hooks import hookimpl
from taskqueue_core.tasks import State, Task
from taskqueue_server.prefect import delivery
from taskqueue_server.worker_socket.uvicorn_protocol import FairProtocol
from tests.prefect.support import KEY, Taker, publish_runs, status, task_run, untouched, url_of
from tests.server.support import Running, eventually, http, running
from tests.server.test_metrics import scrape

Odd = Callable[[Taker], Awaitable[Any]]


class TestSerial:
    """E7: the protocol of Prefect workers is unchanged."""

    async def test_one_at_a_time(self) -> None:
        """E7: a run is sent only after the previous one was acked, and an acked run is done."""
        async with running(lease=60.0) as it, Taker(url_of(it)) as worker:
            await publish_runs(it, "a", "b", "c")
            for done, name in enumerate("abc"):
                assert (await worker.receive())["name"] == name
                await worker.nothing_comes(0.05)
                await it.reaches(KEY, done=done, in_flight=1, waiting=2 - done)
                await worker.ack()
            await it.reaches(KEY, done=3)
            await worker.nothing_comes(0.05)

    async def test_a_worker_without_room_holds_one_as_long_as_it_likes(self) -> None:
        """E7: a worker may delay its ack without limit, as long as it answers pings."""
        async with running(lease=0.6) as it, Taker(url_of(it)) as worker:
            await publish_runs(it, "a", "b")
            await worker.receive()
            await worker.nothing_comes(1.5)
            assert await it.count(State.IN_FLIGHT, KEY) == 1
            await worker.ack()
            assert await worker.take(1) == ["b"]
            await it.reaches(KEY, done=2)
            assert (await status(it)).losses == 0

    async def test_a_dead_peer_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Fault G3: a worker that answers no ping within the lease is disconnected, with or without a delivery."""
        waits: list[float] = []
        start = FairProtocol.start_keepalive

        def note(protocol: FairProtocol) -> None:
            if protocol.ping_interval and protocol.ping_timeout:
                waits.append(protocol.ping_interval + protocol.ping_timeout)
            start(protocol)

        monkeypatch.setattr(FairProtocol, "start_keepalive", note)
        async with (
            running(lease=0.9) as it,
            Taker(url_of(it), client_id="idle", quiet=True) as idle,
            Taker(url_of(it), client_id="other") as other,
        ):
            await idle.authenticate()
            await idle.send("subscribe", keys=["x"], client_id="idle")
            await publish_runs(it, "a")
            await other.receive()
            idle.socket.transport.pause_reading()
            other.socket.transport.pause_reading()
            await eventually(lambda: len(it.context.registry) == 0, 30)
            await untouched(it)
        assert waits
        assert max(waits) <= 0.9

    async def test_every_key_has_its_turn(self) -> None:
        """E5: a worker with several keys gets runs of each key in turn."""
        async with running() as it:
            await publish_runs(it, *(f"a{n}" for n in range(6)), key="add-1")
            await publish_runs(it, *(f"b{n}" for n in range(6)), key="sub-1")
            async with Taker(url_of(it), "add-1", "sub-1") as worker:
                names = await worker.take(12)
            assert {name[0] for name in names[:2]} == {"a", "b"}
            assert sorted(names) == [f"{k}{n}" for k in "ab" for n in range(6)]
            turns = sum(one[0] != other[0] for one, other in pairwise(names))
            assert turns >= 8

    async def test_workers_share(self) -> None:
        """REV-E5, REV-E6, fault G6: each worker holds at most one run, and two workers may have the same id."""
        async with (
            running() as it,
            Taker(url_of(it), client_id="same") as one,
            Taker(url_of(it), client_id="same") as other,
        ):
            await eventually(lambda: it.context.registry.connections("same") == 2)
            await publish_runs(it, "a", "b", "c")
            names = [(await one.receive())["name"], (await other.receive())["name"]]
            assert sorted(names) == ["a", "b"]
            other.socket.transport.abort()
            await eventually(lambda: it.context.registry.connections("same") == 1)
            await one.ack()
            assert await one.take(2) == [names[1], "c"]
            await it.reaches(KEY, done=3)

    async def test_not_before_its_time(self) -> None:
        """Law 8: a scheduled run is sent to a waiting worker when it is due."""
        async with running() as it, Taker(url_of(it)) as worker:
            at = it.backend.now() + 0.2
            await publish_runs(it, "a", not_before=at)
            assert await worker.take(1) == ["a"]
            assert it.backend.now() >= at

    async def test_a_retry_after_the_ack(self) -> None:
        """REV-E1, REV-E2, fault F11: a retry that is requested after the ack is sent at its scheduled time."""
        async with running() as it, Taker(url_of(it)) as worker, http(it) as client:
            await publish_runs(it, "a")
            run = await worker.receive()
            await worker.ack()
            await it.reaches(KEY, done=1)
            again = {"key": KEY, "id": "a", "payload": run}
            at = it.backend.now() + 0.2
            for answered in (201, 200):
                body = {"task": again, "delay": 0.2, "token": "AwaitingRetry-1"}
                assert (await client.post("/v1/retries", json=body)).status_code == answered
            assert await worker.receive() == run
            assert it.backend.now() >= at
            await worker.ack()
            await worker.nothing_comes()
            await it.reaches(KEY, done=2, scheduled=0, waiting=0)

    async def test_metrics_tell_of_it(self) -> None:
        """E7, fault K1: the metrics for credit and held tasks include Prefect workers."""
        async with running() as it, Taker(url_of(it)) as worker, http(it) as client:

            async def told() -> tuple[float, float]:
                seen = await scrape(client)
                return seen("credit_tasks"), seen("held_tasks")

            async def tells(credit: int, held: int) -> bool:
                return await told() == (credit, held)

            await eventually(lambda: tells(1, 0))
            await publish_runs(it, "a")
            await worker.receive()
            assert await told() == (0, 1)
            await worker.ack()
            await eventually(lambda: tells(1, 0))

    async def test_plugins_hear_of_it(self) -> None:
        """Plugins are notified of Prefect workers, and connections are counted, as for other workers."""
        heard = []

        class Plugin:
            @hookimpl
            def worker_connected(self, connection: Any) -> None:
                heard.append(("connected", connection.worker_id, connection.keys))

            @hookimpl
            def worker_disconnected(self, connection: Any, reason: str) -> None:
                heard.append((reason, connection.worker_id, connection.keys))

        async with running() as it:
            it.context.hooks.register(Plugin())
            async with Taker(url_of(it), KEY, KEY) as worker:
                await eventually(lambda: len(heard) == 1)
                (known,) = await it.backend.control.workers()  # type: ignore[attr-defined]
                assert (known.worker_id, known.keys) == ("host-1", (KEY,))
                await worker.send("quit")
            await eventually(lambda: len(heard) == 2)
        assert heard == [("connected", "host-1", (KEY,)), ("quit", "host-1", (KEY,))]


async def goes(worker: Taker) -> None:
    """Close the connection as a worker does that ends normally."""
    await worker.socket.close(1000)


async def breaks(worker: Taker) -> None:
    """Abort the connection, as if the worker was killed."""
    worker.socket.transport.abort()


def says(data: str | bytes) -> Odd:
    """Return a function that sends this text or these bytes instead of an ack."""

    async def say(worker: Taker) -> None:
        await worker.socket.send(data)

    return say


class TestOddAnswers:
    """REV-E3: after any answer other than an ack, the run goes to another worker at once."""

    @pytest.mark.parametrize(
        ("odd", "code"),
        [
            (says('{"type":"quit"}'), 4000),
            (says('{"type":"nack"}'), 4001),
            (says('{"type":null}'), 4001),
            (says('{"kind":"ack"}'), 4001),
            (says('"ack"'), 4001),
            (says("ack"), 4001),
            (says(""), 4001),
            (says('{"type":"ack"'), 4001),
            (says(b'{"type":"ack"}'), 4001),
            (says("[" * 100_000), 4001),
            (says("x" * (1024 * 1024 + 1)), 1009),
            (goes, None),
            (breaks, None),
        ],
        ids=(
            "quit nack null kind text word nothing half bytes deep large goes breaks".split()  # noqa: SIM905 - a string is easier to read than a list of quoted words
        ),
    )
    async def test_nothing_is_lost(self, odd: Odd, code: int | None) -> None:
        """E7, REV-E3, law 3, fault G9: an answer other than an ack loses no run.

        With Prefect's own server, "quit" and invalid data would.
        """
        async with running(grace=30) as it, Taker(url_of(it)) as worker:
            await publish_runs(it, "a", "b")
            await worker.receive()
            async with Taker(url_of(it), client_id="heir") as heir:
                assert (await heir.receive())["name"] == "b"
                await odd(worker)
                if code is not None:
                    assert (await worker.closed())[0] == code
                await heir.ack()
                assert (await heir.receive())["name"] == "a"
                found = await status(it)
                assert (found.attempt, found.losses) == (1, 0)
                await heir.ack()
                await it.reaches(KEY, done=2)

    async def test_many_that_misbehave(self) -> None:
        """E7, law 2: with many misbehaving workers, each run is acked exactly once."""
        names = [f"t{n}" for n in range(300)]
        choose = random.Random(7)
        acked: list[str] = []
        odd = (breaks, goes, says('{"type":"quit"}'), says("x"), says(b"x"), says('{"type":"no"}'))

        async def life(it: Running, client_id: str) -> None:
            while len(acked) < len(names):
                async with Taker(url_of(it), client_id=client_id) as worker:
                    try:
                        while choose.random() < 0.8:
                            run = await worker.receive(0.2)
                            acked.append(run["name"])
                            await worker.ack()
                        await worker.receive(0.2)
                        await choose.choice(odd)(worker)
                    except TimeoutError:
                        await (await worker.socket.ping())  # the server has processed the last ack

        async with running(grace=30) as it:
            await publish_runs(it, *names)
            await asyncio.gather(*(life(it, f"host-{n % 4}") for n in range(8)))
            await it.reaches(KEY, done=len(names), in_flight=0)
            await eventually(lambda: len(it.context.registry) == 0)
        assert sorted(acked) == sorted(names)

    async def test_what_goes_back_comes_first(self) -> None:
        """E5, law 4: a returned run is sent before newer ones of its key."""
        async with running() as it:
            await publish_runs(it, "a", "b", "c")
            async with Taker(url_of(it)) as worker:
                assert (await worker.receive())["name"] == "a"
            await it.reaches(KEY, in_flight=0)
            async with Taker(url_of(it)) as worker:
                assert await worker.take(3) == ["a", "b", "c"]

    async def test_a_full_queue_takes_it_back(self) -> None:
        """REV-E4, law 6: a returned run is neither refused nor dropped, even if the queue is full."""
        async with running() as it:
            await it.context.control.configure(KEY, QueueSettings(capacity=1))
            async with Taker(url_of(it)) as worker:
                await publish_runs(it, "a")
                await worker.receive()
                await publish_runs(it, "b", "c")
                await it.reaches(KEY, published=2, in_flight=1, waiting=1)
                await worker.send("quit")
                await worker.closed()
            await it.reaches(KEY, in_flight=0, waiting=2)
            async with Taker(url_of(it)) as worker:
                assert await worker.take(2) == ["a", "b"]


class TestStrayAcks:
    """Law 2: an ack counts only for a run that had been sent before the ack was."""

    async def test_before_anything(self) -> None:
        """An ack before any run closes the connection, and does not count for a later run."""
        async with running() as it, Taker(url_of(it)) as worker:
            await worker.ack()
            assert await worker.closed() == (4001, "ack: no run is waiting for an ack")

    async def test_twice(self) -> None:
        """A second ack for the same run settles nothing, and closes the connection."""
        async with running() as it, Taker(url_of(it)) as worker:
            await publish_runs(it, "a")
            await worker.receive()
            await worker.ack()
            await worker.ack()
            assert (await worker.closed())[0] == 4001
            await it.reaches(KEY, done=1)

    async def test_twice_with_more_to_come(self) -> None:
        """A second ack does not count for the next run, which may already be on its way."""
        async with running() as it, Taker(url_of(it)) as worker:
            await publish_runs(it, *(f"t{n}" for n in range(9)))
            await worker.receive()
            await worker.socket.send('{"type":"ack"}')
            await worker.socket.send('{"type":"ack"}')
            assert (await worker.closed())[0] == 4001
            await it.reaches(KEY, done=1, in_flight=0, waiting=8)

    async def test_on_its_way(self) -> None:
        """An ack that crosses a run on the wire does not count for that run.

        The server knows this from the unanswered ping that it has sent before the run.
        """
        async with running() as it, Taker(url_of(it)) as worker:
            await eventually(lambda: it.context.registry.connections("host-1"))
            worker.socket.transport.pause_reading()
            await publish_runs(it, "a")
            await it.reaches(KEY, in_flight=1)
            await asyncio.sleep(0.05)  # the run has been sent, and the worker reads it later
            await worker.ack()
            await untouched(it)
            worker.socket.transport.resume_reading()
            assert (await worker.closed())[0] == 4001

    async def test_other_servers_have_no_pings(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With another ASGI server, which gives no access to pings, acks count; only a crossing ack is not detected."""
        monkeypatch.setattr("taskqueue_server.process.uvicorn_protocols.SocketProtocol.pings", dict)
        async with running() as it, Taker(url_of(it)) as worker:
            await publish_runs(it, "a", "b")
            assert await worker.take(2) == ["a", "b"]
            await it.reaches(KEY, done=2)


POISON: dict[str, Any] = {
    "not an object": [1],
    "nothing": None,
    "no id": task_run(id=...),
    "an id that is none": task_run(id="a"),
    "no name": task_run(name=...),
    "no dynamic key": task_run(dynamic_key=...),
    "no state": task_run(state=...),
    "another state": task_run(state={"type": "RUNNING", "state_details": {"deferred": True}}),
    "not deferred": task_run(state={"type": "SCHEDULED", "state_details": {"deferred": False}}),
    "another key": task_run("sub-1a2b3c4d"),
    "tags that are none": task_run(tags=3),
    "a number beyond all bounds": task_run(run_count=1e300),
    "a time that is none": task_run(start_time="soon"),
}


class TestPoison:
    """A run that Prefect workers cannot read, after which their process would end, must not be sent."""

    async def test_it_goes_to_the_dead_letters(self) -> None:
        """Fault F20: an unreadable run becomes a dead letter with a reason, and the worker gets the next run."""
        async with running() as it, Taker(url_of(it)) as worker:
            bad = [Task.of(KEY, value) for value in POISON.values()]
            await it.backend.publisher.publish(*bad)
            await publish_runs(it, "good")
            assert await worker.take(1) == ["good"]
            await it.reaches(KEY, dead=len(bad), done=1)
            for what, task in zip(POISON, bad, strict=True):
                letter = await it.context.dead_letters.get(KEY, task.id)
                assert letter is not None, what
                assert letter.reason == delivery.BAD_TASK_RUN
                assert letter.history[-1].error

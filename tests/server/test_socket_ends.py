"""The ways in which a worker socket can end, and how a worker reconnects."""

from __future__ import annotations

import asyncio

import pytest

from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import State
from tests.server.flaky import Flaky
from tests.server.rude import frame
from tests.server.support import eventually, receipts, running

pytestmark = pytest.mark.fast_clock


class TestEnds:
    """E7: unsettled tasks return to the queue, however the socket ends."""

    @pytest.mark.parametrize("how", ["bye", "close", "leave", "garbage", "binary", "utf8", "size"])
    async def test_an_orderly_end_releases_at_once(self, how: str) -> None:
        """REV-E3, E7, faults G8 and G9: after an orderly end, unsettled tasks return at once and do not count as lost.

        They wait neither for the grace nor for the end of the lease.
        """
        async with (
            running(grace=30, lease=30) as it,
            it.worker("w2", credit=2) as other,
            it.worker("w1", credit=2) as worker,
        ):
            await it.publish("a", "b", "c", "d")
            await worker.deliveries(2)
            await other.deliveries(2)
            match how:
                case "bye":
                    await worker.send("bye")
                    assert await worker.closed() == 1000
                case "close":
                    await worker.socket.close(1000)
                case "leave":
                    await worker.socket.close(1001)
                case "garbage":
                    await worker.socket.send('{"type":"ack","receipts":7}')
                    assert await worker.closed() == 4400
                case "binary":
                    await worker.socket.send(b"\x00")
                    assert await worker.closed() == 4400
                case "utf8":
                    await worker.socket.send(b"\xff\xfe", text=True)
                    assert await worker.closed() == 1007
                case "size":
                    await worker.socket.send("x" * (LIMITS.frame + 1))
                    assert await worker.closed() == 1009
            await other.send("credit", n=2)
            again = await other.deliveries(2)
            assert [d.get("losses", 0) for d in again] == [0, 0]
            assert [d["attempt"] for d in again] == [1, 1]

    @pytest.mark.parametrize("how", ["killed", "4000", "1011", "no code"])
    async def test_a_broken_socket_waits_for_the_grace(self, how: str) -> None:
        """D4 and fault G13: after a broken connection, tasks return to the queue once, when the grace is over.

        Each counts as lost once.
        """
        async with running(grace=2, lease=30) as it:
            await it.publish("a")
            async with it.worker("w1", credit=2) as worker:
                await worker.deliveries(1)
                began = asyncio.get_running_loop().time()
                match how:
                    case "killed":
                        worker.break_off()
                    case "4000":
                        await worker.socket.close(4000)
                    case "1011":
                        await worker.socket.close(1011)
                    case "no code":
                        worker.socket.transport.write(bytes.fromhex("888000000000"))
                assert await it.count(State.IN_FLIGHT) == 1
                await it.reaches(waiting=1)
                assert 2 <= asyncio.get_running_loop().time() - began < 3
            async with it.worker("w2", credit=1) as other:
                (again,) = await other.deliveries(1)
                assert (again["attempt"], again["losses"]) == (1, 1)

    async def test_silence_is_the_end(self) -> None:
        """D4, faults G3 and G10: a worker that sends no complete message for a lease is disconnected.

        Its task returns to the queue and counts as lost.
        """
        async with running(lease=15, grace=0.5) as it:
            await it.publish("a")
            async with it.worker("w1", credit=1) as worker:
                await worker.deliveries(1)
                began = asyncio.get_running_loop().time()
                worker.socket.transport.write(frame(b'{"type":"pi', fin=False))
                assert await worker.closed(60) == 4408
                assert 15 <= asyncio.get_running_loop().time() - began < 16
                assert {"type": "ping", "n": 1} in worker.passed_over
            await it.reaches(waiting=1)
            (status,) = await it.backend.control.statuses("k", "a")  # type: ignore[attr-defined]
            assert status.losses == 1

    async def test_pings_keep_a_busy_worker_alive(self) -> None:
        """Fault F22: a worker that answers pings keeps its task, however long the task runs."""
        async with running(lease=15, grace=0) as it, it.worker(credit=1) as worker:
            await it.publish("a")
            (got,) = await worker.deliveries(1)
            for n in range(1, 13):  # four leases with three pings each
                assert (await worker.frame("ping", seconds=6))["n"] == n
                await worker.send("pong", n=n)
            await worker.send("ack", receipts=[got["receipt"]])
            assert await worker.settled(1) == ([got["receipt"]], [])

    async def test_outcomes_sent_before_the_end_still_count(self) -> None:
        """Outcomes that a worker sent before its bye are stored, even if the store is slow."""
        async with running(Flaky(slowness=0.05)) as it:
            await it.publish(*(f"t{i}" for i in range(50)))
            async with it.worker(credit=50) as worker:
                for receipt in receipts(await worker.deliveries(50)):
                    await worker.send("ack", receipts=[receipt])
                await worker.send("bye")
                assert await worker.closed() == 1000
            assert await it.count(State.DONE) == 50

    async def test_closing_while_the_server_sends(self) -> None:
        """Fault G13: if a socket closes while the server is sending, no task is lost or duplicated."""
        async with running(grace=0.05) as it:
            payload = b'"' + b"x" * 20_000 + b'"'
            await it.publish(*(f"t{i}" for i in range(300)), payload=payload)
            for n in range(10):
                async with it.worker(f"w{n}", credit=300) as worker:
                    await worker.deliveries(1)
                    if n % 2:
                        worker.break_off()
            await it.reaches(waiting=300)
            async with it.worker("last", credit=300) as worker:
                got = await worker.deliveries(300)
                assert len({d["task"]["id"] for d in got}) == 300


class TestHandover:
    """A worker that reconnects in time keeps its running tasks."""

    async def test_after_a_break(self) -> None:
        """E7: within the grace, a reconnected worker can settle its tasks with the old receipts."""
        async with running(grace=30) as it:
            await it.publish("a", "b")
            async with it.worker("w", credit=2) as worker:
                got = receipts(await worker.deliveries(2))
                worker.break_off()
            async with it.worker("w", credit=1, holding=[*got, "gone"]) as worker:
                assert worker.welcome["adopted"] == got
                assert (await worker.frame("revoke"))["receipts"] == ["gone"]
                await worker.send("ack", receipts=got)
                assert await worker.settled(2) == (got, [])
            assert await it.count(State.DONE) == 2

    async def test_before_the_server_has_noticed(self) -> None:
        """Fault G3: a worker can adopt its tasks while the server still considers its old socket alive.

        When the old socket ends, the tasks stay with the new one.
        """
        async with running(grace=0, lease=30) as it:
            await it.publish("a")
            async with it.worker("w", credit=1) as old:
                got = receipts(await old.deliveries(1))
                async with it.worker("w", holding=got) as new:
                    assert new.welcome["adopted"] == got
                    old.break_off()
                    await eventually(lambda: len(it.context.registry) == 1)
                    await new.send("ack", receipts=got)
                    assert await new.settled(1) == (got, [])
            assert (await it.ledger()).done == 1

    async def test_adopted_ones_return_with_their_new_connection(self) -> None:
        """Adopted tasks return to the queue after the end of the new connection, not of the old one."""
        async with running(grace=2) as it:
            await it.publish("a")
            async with it.worker("w", credit=1) as worker:
                got = receipts(await worker.deliveries(1))
                worker.break_off()
            async with it.worker("w", holding=got) as worker:
                assert worker.welcome["adopted"] == got
                await eventually(lambda: len(it.context.registry) == 1)
                assert await it.count(State.IN_FLIGHT) == 1
                worker.break_off()
            await it.reaches(waiting=1)

    async def test_another_worker_adopts_nothing(self) -> None:
        """Fault G5: a worker cannot adopt the tasks of another worker."""
        async with running(grace=2) as it:
            await it.publish("a")
            async with it.worker("w", credit=1) as worker:
                got = receipts(await worker.deliveries(1))
                worker.break_off()
            async with it.worker("thief", holding=got) as thief:
                assert "adopted" not in thief.welcome
                assert await it.count(State.IN_FLIGHT) == 1
            await it.reaches(waiting=1)

    @pytest.mark.parametrize("where", ["hello", "ack", "progress"])
    async def test_too_many_unknown_receipts(
        self, where: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Issue 22, A3: a socket that names more than `LIMITS.unknown` unknown receipts is closed, with a log line."""
        names = [f"r{n}" for n in range(LIMITS.unknown + 1)]
        async with running() as it:
            holding = names if where == "hello" else []
            async with it.worker("w", credit=0, holding=holding) as worker:
                if where == "ack":
                    await worker.send("ack", receipts=names[:-1])
                    await worker.settled(LIMITS.unknown)
                    await worker.send("ack", receipts=names[-1:])
                if where == "progress":
                    for name in names:
                        await worker.send("progress", receipt=name, value=0.5)
                assert await worker.closed() == 1013
        assert "the worker named too many unknown receipts" in caplog.text


class TestSharedIdentity:
    """REV-E5 and fault G6: two sockets of one worker."""

    async def test_closing_one_leaves_the_other(self) -> None:
        """When one socket closes, the worker stays registered with the other one.

        The other socket keeps its tasks and gets new ones.
        """
        async with running() as it, it.worker("w", credit=1) as one:
            async with it.worker("w") as two:
                await it.publish("a")
                (got,) = await one.deliveries(1)
                (info,) = await it.backend.control.workers()  # type: ignore[attr-defined]
                assert info.connections == it.context.registry.connections("w") == 2
                await two.send("bye")
                await two.closed()
            await eventually(lambda: it.context.registry.connections("w") == 1)
            (info,) = await it.backend.control.workers()  # type: ignore[attr-defined]
            assert (info.connections, info.in_flight) == (1, 1)
            await one.send("ack", receipts=[got["receipt"]])
            assert await one.settled(1) == ([got["receipt"]], [])
            await it.publish("b")
            await one.send("credit", n=1)
            await one.deliveries(1)

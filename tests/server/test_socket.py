"""The socket over the wire: delivery, settlement, credit, and the ways it can end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.limits import LIMITS
from taskqueue_core.retry import RetryPolicy
from taskqueue_core.tasks import State, Task
from taskqueue_memory import MemoryBackend
from tests.server.support import eventually, receipts, running


class TestWork:
    """What a worker is for."""

    async def test_a_worker_receives_and_acks(self) -> None:
        """REV-E6, E7 and G5: one socket serves all keys of a worker, which settles on the same connection."""
        async with running() as it:
            await it.publish("a", "b", key="k1")
            await it.publish("c", key="k2")
            async with it.worker("w", "k1", "k2", credit=10) as worker:
                got = await worker.deliveries(3)
                assert {d["task"]["id"] for d in got} == {"a", "b", "c"}
                first = got[0]["task"]
                await worker.send(
                    "ack", receipts=receipts(got), results={got[0]["receipt"]: {"x": 1}}
                )
                ok, lost = await worker.settled(3)
                assert sorted(ok) == sorted(receipts(got))
                assert not lost
                stored = await it.backend.control.results(first["key"], first["id"])  # type: ignore[attr-defined]
                assert stored == (b'{"x":1}',)
            assert (await it.ledger("k1")).done == 2
            assert (await it.ledger("k2")).done == 1

    async def test_tasks_come_as_they_are_published(self) -> None:
        async with running() as it, it.worker(credit=1) as worker:
            await asyncio.sleep(0)
            await it.publish("a", payload=b'{"n": 1.50}', headers={"h": "v"}, tenant="t")
            (got,) = await worker.deliveries(1)
            assert got["attempt"] == 1
            assert got["task"]["payload"] == {"n": 1.5}
            assert got["task"]["headers"] == {"h": "v"}
            assert got["task"]["tenant"] == "t"

    async def test_redeliver_comes_back_at_once_with_the_same_attempt(self) -> None:
        """REV-E1 and law 3: handing back is no failure."""
        async with running() as it, it.worker(credit=2) as worker:
            await it.publish("a")
            (got,) = await worker.deliveries(1)
            await worker.send("redeliver", receipts=[got["receipt"]])
            (again,) = await worker.deliveries(1)
            assert (again["attempt"], again.get("losses", 0)) == (1, 0)
            assert again["receipt"] != got["receipt"]

    async def test_retry_follows_the_policy_of_the_queue(self) -> None:
        """D3, REV-E1 and law 9: a failed attempt is tried again by the settings in force, then set aside."""
        backend = MemoryBackend()
        policy = RetryPolicy(base=0.01, jitter=0, max_attempts=2)
        async with running(backend) as it, it.worker(credit=5) as worker:
            await backend.control.configure("k", QueueSettings(retry=policy))
            await it.publish("a")
            (one,) = await worker.deliveries(1)
            await worker.send("retry", receipt=one["receipt"], error="boom")
            (two,) = await worker.deliveries(1)
            assert two["attempt"] == 2
            await worker.send("retry", receipt=two["receipt"], error="boom again")
            await it.reaches(dead=1)
            (letter,) = await backend.dead_letters.list("k")
            assert letter.reason == "max_retries_exceeded"
            assert [failure.error for failure in letter.history] == ["boom", "boom again"]

    async def test_retry_with_a_delay_waits_so_long(self) -> None:
        async with running() as it, it.worker(credit=5) as worker:
            await it.publish("a")
            (got,) = await worker.deliveries(1)
            await worker.send("retry", receipt=got["receipt"], error="later", delay=3600)
            assert (await worker.settled(1))[0] == [got["receipt"]]
            assert await it.count(State.SCHEDULED) == 1

    async def test_dead_letter_keeps_reason_and_error(self) -> None:
        async with running() as it, it.worker(credit=5) as worker:
            await it.publish("a")
            (got,) = await worker.deliveries(1)
            await worker.send("dead_letter", receipt=got["receipt"], reason="no", error="why")
            await worker.settled(1)
            (letter,) = await it.backend.dead_letters.list("k")  # type: ignore[attr-defined]
            assert (letter.reason, letter.history[-1].error) == ("no", "why")

    async def test_progress_is_noted(self) -> None:
        async with running() as it, it.worker(credit=5) as worker:
            await it.publish("a")
            (got,) = await worker.deliveries(1)
            await worker.send("progress", receipt=got["receipt"], value=0.25)

            async def noted() -> bool:
                (status,) = await it.backend.control.statuses("k", "a")  # type: ignore[attr-defined]
                return bool(status.progress == 0.25)

            await eventually(noted)

    async def test_cancel_takes_a_running_task_away(self) -> None:
        async with running() as it, it.worker(credit=5) as worker:
            await it.publish("a")
            (got,) = await worker.deliveries(1)
            assert await it.backend.control.cancel("k", "a")  # type: ignore[attr-defined]
            revoked = await worker.frame("revoke")
            assert revoked["receipts"] == [got["receipt"]]
            await worker.send("ack", receipts=[got["receipt"]])
            assert await worker.settled(1) == ([], [got["receipt"]])
            assert await it.count(State.CANCELLED) == 1

    async def test_hundreds_of_acks_are_settled_in_few_calls(self) -> None:
        """What has queued up while the store answers is settled in one call."""
        calls: list[int] = []

        class Counting(MemoryBackend):
            def subscribe(self, keys: Any, consumer: str) -> Any:
                subscription = super().subscribe(keys, consumer)
                ack = subscription.ack

                async def counted(*deliveries: Any, results: Any = ()) -> Any:
                    calls.append(len(deliveries))
                    await asyncio.sleep(0.01)
                    return await ack(*deliveries, results=results)

                subscription.ack = counted  # type: ignore[method-assign]
                return subscription

        async with running(Counting()) as it, it.worker(credit=500) as worker:
            await it.publish(*(f"t{i}" for i in range(500)))
            for receipt in receipts(await worker.deliveries(500)):
                await worker.send("ack", receipts=[receipt])
            await worker.settled(500)
            assert sum(calls) == 500
            assert len(calls) < 100


class TestCredit:
    """Flow control."""

    async def test_no_more_than_granted(self) -> None:
        """Fault G1: in flight never exceeds what the worker has asked for."""
        async with running() as it:
            await it.publish(*(f"t{i}" for i in range(20)))
            async with it.worker(credit=3) as worker:
                got = await worker.deliveries(3)
                await worker.send("ping", n=1)
                await worker.frame("pong")
                assert await it.count(State.IN_FLIGHT) == 3
                await worker.send("ack", receipts=receipts(got))
                await worker.settled(3)
                assert await it.count(State.IN_FLIGHT) == 0
                await worker.send("credit", n=2)
                await worker.deliveries(2)
                assert await it.count(State.IN_FLIGHT) == 2

    async def test_without_credit_nothing_comes(self) -> None:
        async with running() as it, it.worker() as worker:
            await it.publish("a")
            await worker.send("ping", n=1)
            await worker.frame("pong")
            assert await it.count(State.WAITING) == 1

    async def test_too_much_credit_is_refused(self) -> None:
        async with running() as it, it.worker(credit=1) as worker:
            await worker.send("credit", n=LIMITS.credit)
            assert (await worker.frame("error"))["code"] == "too_much_credit"
            assert await worker.closed() == 4400


class TestStaleReceipts:
    """Fault G5 and law 2: what is not held changes nothing."""

    async def test_of_another_connection(self) -> None:
        async with running() as it, it.worker("w1", credit=1) as one, it.worker("w2") as two:
            await it.publish("a")
            (got,) = await one.deliveries(1)
            await two.send("ack", receipts=[got["receipt"]])
            assert await two.settled(1) == ([], [got["receipt"]])
            assert await it.count(State.IN_FLIGHT) == 1

    async def test_never_issued(self) -> None:
        async with running() as it, it.worker(credit=1) as worker:
            await worker.send("ack", receipts=["made-up"])
            await worker.send("retry", receipt="made-up-too")
            assert await worker.settled(2) == ([], ["made-up", "made-up-too"])

    async def test_twice(self) -> None:
        async with running() as it, it.worker(credit=1) as worker:
            await it.publish("a")
            (got,) = await worker.deliveries(1)
            for expected in (([got["receipt"]], []), ([], [got["receipt"]])):
                await worker.send("ack", receipts=[got["receipt"]])
                assert await worker.settled(1) == expected
            assert await it.count(State.DONE) == 1

    async def test_after_a_disconnect(self) -> None:
        async with running() as it:
            await it.publish("a")
            async with it.worker(credit=1) as worker:
                (got,) = await worker.deliveries(1)
            async with it.worker(credit=0, holding=[got["receipt"]]) as worker:
                assert worker.welcome.get("adopted", []) == []
                assert (await worker.frame("revoke"))["receipts"] == [got["receipt"]]
                await worker.send("ack", receipts=[got["receipt"]])
                assert await worker.settled(1) == ([], [got["receipt"]])
            assert await it.count(State.WAITING) == 1


class TestEnds:
    """E7: whatever is not settled goes back, however the socket ends."""

    @pytest.mark.parametrize("how", ["bye", "close", "leave", "garbage", "binary", "utf8", "size"])
    async def test_an_orderly_end_hands_back_at_once(self, how: str) -> None:
        """REV-E3, E7, faults G8 and G9: at once, and not as a loss, long before any grace or lease is over."""
        async with running(grace=30, lease=30) as it, it.worker("w2", credit=2) as other:
            async with it.worker("w1", credit=2) as worker:
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
        """D4 and fault G13: a crash counts one loss, and the tasks are back after the grace, once."""
        async with running(grace=0.2, lease=30) as it:
            await it.publish("a")
            async with it.worker("w1", credit=2) as worker:
                await worker.deliveries(1)
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
            async with it.worker("w2", credit=1) as other:
                (again,) = await other.deliveries(1)
                assert (again["attempt"], again["losses"]) == (1, 1)

    async def test_silence_is_the_end(self) -> None:
        """D4 and fault G3: a worker that says nothing for a lease is closed, and its tasks go to others as lost."""
        async with running(lease=0.3, grace=0.05) as it:
            await it.publish("a")
            async with it.worker("w1", credit=1) as worker:
                await worker.deliveries(1)
                began = asyncio.get_running_loop().time()
                assert await worker.closed() == 4408
                assert asyncio.get_running_loop().time() - began < 0.3 * 1.5
                assert {"type": "ping", "n": 1} in worker.passed_over
            await it.reaches(waiting=1)

    async def test_pings_keep_a_busy_worker_alive(self) -> None:
        """F22: however long a task runs, it stays with its live worker."""
        async with running(lease=0.15, grace=0) as it, it.worker(credit=1) as worker:
            await it.publish("a")
            (got,) = await worker.deliveries(1)
            loop = asyncio.get_running_loop()
            end = loop.time() + 0.6
            while loop.time() < end:
                frame = await worker.frame("ping")
                await worker.send("pong", n=frame["n"])
            await worker.send("ack", receipts=[got["receipt"]])
            assert await worker.settled(1) == ([got["receipt"]], [])

    async def test_verdicts_sent_before_the_end_still_count(self) -> None:
        """A worker may settle, say bye and go."""
        async with running() as it:
            await it.publish(*(f"t{i}" for i in range(50)))
            async with it.worker(credit=50) as worker:
                for receipt in receipts(await worker.deliveries(50)):
                    await worker.send("ack", receipts=[receipt])
                await worker.send("bye")
                assert await worker.closed() == 1000
            assert await it.count(State.DONE) == 50

    async def test_closing_while_the_server_sends(self) -> None:
        """Fault G13: a socket that closes under fire loses nothing and doubles nothing."""
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
    """A worker that comes back in time keeps what it runs."""

    async def test_after_a_break(self) -> None:
        """E7: within the grace the deliveries wait, and the new connection settles them with the old receipts."""
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
        """Fault G3: a worker may be back while its old socket still looks alive; that one then lets go."""
        async with running(grace=0, lease=30) as it:
            await it.publish("a")
            async with it.worker("w", credit=1) as old:
                got = receipts(await old.deliveries(1))
                async with it.worker("w", holding=got) as new:
                    assert new.welcome["adopted"] == got
                    old.break_off()
                    await eventually(lambda: len(it.hub.registry) == 1)
                    await new.send("ack", receipts=got)
                    assert await new.settled(1) == (got, [])
            assert (await it.ledger()).done == 1

    async def test_adopted_ones_return_with_their_new_connection(self) -> None:
        async with running(grace=0.1) as it:
            await it.publish("a")
            async with it.worker("w", credit=1) as worker:
                got = receipts(await worker.deliveries(1))
                worker.break_off()
            async with it.worker("w", holding=got) as worker:
                assert worker.welcome["adopted"] == got
                await eventually(lambda: len(it.hub.registry) == 1)
                assert await it.count(State.IN_FLIGHT) == 1
                worker.break_off()
            await it.reaches(waiting=1)

    async def test_another_worker_adopts_nothing(self) -> None:
        """Fault G5: receipts are bound to the worker's identity."""
        async with running(grace=0.3) as it:
            await it.publish("a")
            async with it.worker("w", credit=1) as worker:
                got = receipts(await worker.deliveries(1))
                worker.break_off()
            async with it.worker("thief", holding=got) as thief:
                assert "adopted" not in thief.welcome
                assert await it.count(State.IN_FLIGHT) == 1
            await it.reaches(waiting=1)


class TestSharedIdentity:
    """REV-E5 and fault G6: two sockets of one worker."""

    async def test_closing_one_leaves_the_other(self) -> None:
        async with running() as it, it.worker("w", credit=1) as one:
            async with it.worker("w") as two:
                await it.publish("a")
                (got,) = await one.deliveries(1)
                (info,) = await it.backend.control.workers()  # type: ignore[attr-defined]
                assert info.connections == it.hub.registry.connections("w") == 2
                await two.send("bye")
                await two.closed()
            await eventually(lambda: it.hub.registry.connections("w") == 1)
            (info,) = await it.backend.control.workers()  # type: ignore[attr-defined]
            assert (info.connections, info.in_flight) == (1, 1)
            await one.send("ack", receipts=[got["receipt"]])
            assert await one.settled(1) == ([got["receipt"]], [])
            await it.publish("b")
            await one.send("credit", n=1)
            await one.deliveries(1)


async def test_deliveries_are_shared_out_by_credit() -> None:
    """Two workers on one key each get what they asked for and no task comes twice."""
    async with (
        running() as it,
        it.worker("w1", credit=30) as one,
        it.worker("w2", credit=30) as two,
    ):
        await it.publish(*(f"t{i}" for i in range(60)))
        got = await one.deliveries(30) + await two.deliveries(30)
        assert len({d["task"]["id"] for d in got}) == 60


async def test_one_byte_at_a_time() -> None:
    """Fault G10: a frame in many fragments is one frame."""
    async with running() as it, it.worker(credit=1) as worker:
        await it.publish("a")
        (got,) = await worker.deliveries(1)
        await worker.socket.send(iter('{"type":"ack","receipts":["' + got["receipt"] + '"]}'))
        assert await worker.settled(1) == ([got["receipt"]], [])


async def test_the_task_is_rebuilt_from_what_was_sent() -> None:
    """Every field of a task survives the way from publisher to worker."""
    task = Task(key="k", id="t", payload=b"[1]", headers={"a": "b"}, priority=7, tenant="x")
    async with running() as it, it.worker(credit=1) as worker:
        await it.backend.publisher.publish(task)
        (got,) = await worker.deliveries(1)
        assert got["task"] == {
            "id": "t",
            "key": "k",
            "payload": [1],
            "headers": {"a": "b"},
            "priority": 7,
            "tenant": "x",
        }

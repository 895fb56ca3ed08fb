"""The worker socket of a real server: delivery, settlement and credit."""

from __future__ import annotations

import asyncio
from typing import Any

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.retry import RetryPolicy
from taskqueue_core.tasks import State, Task
from taskqueue_memory import MemoryBackend
from tests.server.support import eventually, receipts, running


class TestWork:
    """A worker receives tasks and settles them."""

    async def test_a_worker_receives_and_acks(self) -> None:
        """REV-E6, E7 and G5: one socket serves all keys of a worker, and the worker settles on the same socket."""
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
        """A worker with unused credit gets a new task as soon as it is published, with all its fields."""
        async with running() as it, it.worker(credit=1) as worker:
            await asyncio.sleep(0)
            await it.publish("a", payload=b'{"n": 1.50}', headers={"h": "v"}, tenant="t")
            (got,) = await worker.deliveries(1)
            assert got["attempt"] == 1
            assert got["task"]["payload"] == {"n": 1.5}
            assert got["task"]["headers"] == {"h": "v"}
            assert got["task"]["tenant"] == "t"

    async def test_redeliver_comes_back_at_once_with_the_same_attempt(self) -> None:
        """REV-E1 and law 3: a redelivered task comes back at once with the same attempt number and no loss."""
        async with running() as it, it.worker(credit=2) as worker:
            await it.publish("a")
            (got,) = await worker.deliveries(1)
            await worker.send("redeliver", receipts=[got["receipt"]])
            (again,) = await worker.deliveries(1)
            assert (again["attempt"], again.get("losses", 0)) == (1, 0)
            assert again["receipt"] != got["receipt"]

    async def test_retry_follows_the_policy_of_the_queue(self) -> None:
        """D3, REV-E1 and law 9: a failed task is retried by the current retry policy of its queue.

        When the policy allows no further attempt, the task becomes a dead letter.
        """
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
        """A delay in the retry frame overrides the retry policy of the queue."""
        async with running() as it, it.worker(credit=5) as worker:
            await it.publish("a")
            (got,) = await worker.deliveries(1)
            await worker.send("retry", receipt=got["receipt"], error="later", delay=3600)
            assert (await worker.settled(1))[0] == [got["receipt"]]
            assert await it.count(State.SCHEDULED) == 1

    async def test_dead_letter_keeps_reason_and_error(self) -> None:
        """A dead letter keeps the reason and the error that the worker sent."""
        async with running() as it, it.worker(credit=5) as worker:
            await it.publish("a")
            (got,) = await worker.deliveries(1)
            await worker.send("dead_letter", receipt=got["receipt"], reason="no", error="why")
            await worker.settled(1)
            (letter,) = await it.backend.dead_letters.list("k")  # type: ignore[attr-defined]
            assert (letter.reason, letter.history[-1].error) == ("no", "why")

    async def test_progress_is_noted(self) -> None:
        """Progress that a worker reports appears in the status of the task."""
        async with running() as it, it.worker(credit=5) as worker:
            await it.publish("a")
            (got,) = await worker.deliveries(1)
            await worker.send("progress", receipt=got["receipt"], value=0.25)

            async def noted() -> bool:
                (status,) = await it.backend.control.statuses("k", "a")  # type: ignore[attr-defined]
                return bool(status.progress == 0.25)

            await eventually(noted)

    async def test_cancel_takes_a_running_task_away(self) -> None:
        """Fault F21: a worker whose running task is cancelled gets a revoke, and its later outcome changes nothing."""
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
        """Acks that arrive while the store is busy are settled together in one call."""
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
    """Flow control by credit."""

    async def test_no_more_than_granted(self) -> None:
        """Fault G1: a worker never has more deliveries than the credit it has granted, even if that is 0."""
        async with running() as it:
            await it.publish(*(f"t{i}" for i in range(20)))
            async with it.worker() as worker:

                async def in_flight() -> int:
                    await worker.send("ping", n=1)
                    await worker.frame("pong")
                    return await it.count(State.IN_FLIGHT)

                assert await in_flight() == 0
                await worker.send("credit", n=3)
                got = await worker.deliveries(3)
                assert await in_flight() == 3
                await worker.send("ack", receipts=receipts(got))
                await worker.settled(3)
                assert await in_flight() == 0
                await worker.send("credit", n=2)
                await worker.deliveries(2)
                assert await in_flight() == 2


class TestStaleReceipts:
    """Fault G5 and law 2: a receipt that the worker does not hold changes nothing."""

    async def test_what_is_not_held(self) -> None:
        """A receipt of another connection, an invented one and a settled one are answered as lost.

        They change nothing.
        """
        async with running() as it, it.worker("w1", credit=1) as one, it.worker("w2") as two:
            await it.publish("a")
            receipt = receipts(await one.deliveries(1))
            await two.send("ack", receipts=receipt)
            await two.send("retry", receipt="made-up")
            assert await two.settled(2) == ([], [*receipt, "made-up"])
            assert await it.count(State.IN_FLIGHT) == 1
            await one.send("ack", receipts=receipt)
            assert await one.settled(1) == (receipt, [])
            await one.send("ack", receipts=receipt)
            assert await one.settled(1) == ([], receipt)
            assert await it.count(State.DONE) == 1

    async def test_after_a_disconnect(self) -> None:
        """Receipts from before a disconnect are revoked and answered as lost."""
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


async def test_deliveries_are_shared_out_by_credit() -> None:
    """Two workers with the same key get as many tasks as their credit allows, and no task is delivered twice."""
    async with (
        running() as it,
        it.worker("w1", credit=30) as one,
        it.worker("w2", credit=30) as two,
    ):
        await it.publish(*(f"t{i}" for i in range(60)))
        got = await one.deliveries(30) + await two.deliveries(30)
        assert len({d["task"]["id"] for d in got}) == 60


async def test_one_byte_at_a_time() -> None:
    """Fault G10: a message that is sent in many fragments is read as one frame."""
    async with running() as it, it.worker(credit=1) as worker:
        await it.publish("a")
        (got,) = await worker.deliveries(1)
        await worker.socket.send(iter('{"type":"ack","receipts":["' + got["receipt"] + '"]}'))
        assert await worker.settled(1) == ([got["receipt"]], [])


async def test_the_task_is_rebuilt_from_what_was_sent() -> None:
    """A delivery contains every field of the published task."""
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

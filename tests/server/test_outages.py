"""What a worker observes while the store is unavailable, and which capabilities the server requires."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import pytest

from taskqueue_core.backend import Capabilities, Capability
from taskqueue_core.errors import CapabilityMissing
from taskqueue_core.tasks import State
from taskqueue_memory import MemoryBackend
from taskqueue_server import create_app
from tests.server.flaky import Flaky, Plain
from tests.server.support import Worker, eventually, http, receipts, running, settings

pytestmark = pytest.mark.fast_clock


class TestOutage:
    """Fault G14: during an outage workers are notified and keep their connection."""

    async def test_workers_are_notified_and_served_again(self) -> None:
        """Fault G14: a worker is notified when the outage starts and when it ends, on the same connection."""
        backend = Flaky()
        async with running(backend) as it, it.worker(credit=5) as worker:
            backend.down.set()
            assert (await worker.frame("degraded")).get("ok", False) is False
            backend.down.clear()
            assert (await worker.frame("degraded"))["ok"] is True
            await it.publish("a")
            (got,) = await worker.deliveries(1)
            await worker.send("ack", receipts=[got["receipt"]])
            assert await worker.settled(1) == ([got["receipt"]], [])

    async def test_outcomes_wait_until_the_store_is_back(self) -> None:
        """D1: an outcome is confirmed only after it is stored, and outcomes sent during an outage are not lost."""
        backend = Flaky()
        async with running(backend) as it, it.worker(credit=5) as worker:
            await it.publish("a", "b", "c")
            got = receipts(await worker.deliveries(3))
            backend.down.set()
            await worker.frame("degraded")
            await worker.send("ack", receipts=got[:1])
            await worker.send("redeliver", receipts=got[1:2])
            await worker.send("dead_letter", receipt=got[2], reason="r")
            await worker.send("ping", n=3)
            await worker.frame("pong")
            assert await it.count(State.IN_FLIGHT) == 3
            backend.down.clear()
            assert sorted((await worker.settled(3))[0]) == sorted(got)
            await it.reaches(done=1, dead=1, in_flight=1)

    async def test_results_that_wait_are_bounded(self) -> None:
        """Fault G1: if too many bytes of results are waiting for the store, the server stops reading frames.

        After the outage every result is stored.
        """
        backend = Flaky()
        async with running(backend, lease=30) as it, it.worker(credit=50) as worker:
            await it.publish(*(f"t{i}" for i in range(40)))
            got = receipts(await worker.deliveries(40))
            backend.down.set()
            await worker.frame("degraded")
            sending = asyncio.create_task(self.ack_all(worker, got))
            with pytest.raises(TimeoutError):
                await worker.frame("pong", seconds=0.3)
            backend.down.clear()
            assert sorted((await worker.settled(40))[0]) == sorted(got)
            await sending
            if not any(frame["type"] == "pong" for frame in worker.passed_over):
                await worker.frame("pong")

    async def ack_all(self, worker: Worker, got: list[str]) -> None:
        """Ack each receipt with a large result, then send a ping."""
        for receipt in got:
            await worker.send("ack", receipts=[receipt], results={receipt: "x" * 200_000})
        await worker.send("ping", n=1)

    async def test_a_lost_answer_is_asked_for_again(self) -> None:
        """Fault E2 and law 2: an ack whose response was lost is sent again and still counts once."""
        backend = Flaky()
        async with running(backend) as it, it.worker(credit=1) as worker:
            await it.publish("a")
            got = receipts(await worker.deliveries(1))
            backend.lost = 2
            await worker.send("ack", receipts=got)
            assert await worker.settled(1) == (got, [])
            assert backend.calls.count("ack") == 3
            assert await it.count(State.DONE) == 1

    async def test_a_worker_that_holds_something_is_sent_away_until_it_can_adopt(self) -> None:
        """A worker that holds deliveries is asked to try again later if the store cannot adopt them.

        A welcome would have to say which deliveries the worker still holds.
        """
        backend = Flaky()
        async with running(backend, grace=30) as it:
            await it.publish("a")
            async with it.worker("w", credit=1) as worker:
                got = receipts(await worker.deliveries(1))
                worker.break_off()
            backend.down.set()
            async with it.socket() as socket:
                await socket.send(
                    '{"type":"hello","worker_id":"w","keys":["k"],"holding":["' + got[0] + '"]}'
                )
                await asyncio.wait_for(socket.wait_closed(), 20)
                assert socket.close_code == 1013
            backend.down.clear()

    async def test_a_connection_that_breaks_before_its_welcome_still_has_a_grace(self) -> None:
        """E5: if a connection breaks after its hello but before its welcome, its deliveries wait for a grace period."""
        backend = Flaky()
        async with running(backend, grace=30) as it:
            await it.publish("a")
            async with it.worker("w", credit=1) as worker:
                got = receipts(await worker.deliveries(1))
                worker.break_off()
            hello = {"type": "hello", "worker_id": "w", "keys": ["k"], "holding": got}
            async with it.socket() as socket:
                backend.down.set()
                await socket.send(json.dumps(hello))
                await eventually(lambda: "adopt" in backend.calls)
                socket.transport.abort()
                await socket.wait_closed()
            tries = len(backend.calls)
            backend.down.clear()
            await eventually(lambda: len(backend.calls) > tries)
            await asyncio.sleep(0.05)  # Give the server time to send the welcome, which fails.
            async with it.worker("w", holding=got) as worker:
                assert worker.welcome["adopted"] == got

    async def test_an_end_during_an_outage_releases_when_the_store_is_back(self) -> None:
        """E7: deliveries of a worker that disconnects during an outage return to the queue after the outage."""
        backend = Flaky()
        async with running(backend) as it:
            await it.publish("a")
            async with it.worker(credit=1) as worker:
                await worker.deliveries(1)
                backend.down.set()
            await asyncio.sleep(0)
            backend.down.clear()
            await it.reaches(waiting=1)

    async def test_readiness_and_health_follow_the_store(self) -> None:
        """During an outage of the store, ``/ready`` and ``/health`` return 503, and ``/alive`` returns 200."""
        backend = Flaky()
        async with running(backend) as it, http(it) as client:
            assert (await client.get("/ready")).status_code == 200
            backend.down.set()
            assert (await client.get("/ready")).json() == {"ready": False, "reason": "store"}
            assert (await client.get("/health")).status_code == 503
            alive = await client.get("/alive")
            assert (alive.status_code, alive.json()["alive"]) == (200, True), (
                "an outage is no reason to restart the server"
            )


class TestFewCapabilities:
    """A server on a backend without the capabilities for handover and revocation."""

    async def test_what_a_worker_held_is_lost_and_comes_back(self) -> None:
        """Without handover, the deliveries of a reconnecting worker are revoked.

        They are delivered again after the grace and count as lost.
        """
        async with running(Plain(), grace=2) as it:
            await it.publish("a")
            async with it.worker("w", credit=1) as worker:
                got = receipts(await worker.deliveries(1))
                worker.break_off()
            async with it.worker("w", credit=1, holding=got) as worker:
                assert "adopted" not in worker.welcome
                assert (await worker.frame("revoke"))["receipts"] == got
                (again,) = await worker.deliveries(1)
                assert (again["losses"], again["attempt"]) == (1, 1)

    async def test_a_worker_learns_of_a_cancel_when_it_speaks(self) -> None:
        """Law 2: without revocation, a worker learns of a cancelled task from the response to its next frame about it.

        Its outcome changes nothing.
        """
        async with running(Plain()) as it, it.worker(credit=2) as worker:
            await it.publish("a", "b")
            one, two = receipts(await worker.deliveries(2))
            for task_id in ("a", "b"):
                assert await it.backend.control.cancel("k", task_id)  # type: ignore[attr-defined]
            await worker.send("progress", receipt=one, value=0.5)
            assert (await worker.frame("revoke"))["receipts"] == [one]
            await worker.send("ack", receipts=[two])
            assert await worker.settled(1) == ([], [two])
            assert await it.count(State.CANCELLED) == 2

    @pytest.mark.parametrize("missing", [Capability.CONTROL, Capability.DEAD_LETTERS])
    async def test_what_it_needs_is_named_at_the_start(self, missing: Capability) -> None:
        """E3: a backend without a required capability is refused at the start, and the error names the capability."""

        class Lacking(MemoryBackend):
            capabilities = Capabilities(names=frozenset(Capability) - {missing})

        with pytest.raises(CapabilityMissing, match=missing.value):
            create_app(Lacking(), settings())


async def test_a_fault_of_the_backend_ends_one_connection_only() -> None:
    """An unexpected exception of the backend ends only the connection that caused it, and no task is lost."""

    class Faulty(MemoryBackend):
        def subscribe(self, keys: Iterable[str], consumer: str) -> Any:
            subscription = super().subscribe(keys, consumer)
            if consumer == "unlucky":

                async def ack(*_: object, **__: object) -> None:
                    raise ZeroDivisionError

                subscription.ack = ack  # type: ignore[assignment]
            return subscription

    async with running(Faulty(), grace=0) as it, it.worker("lucky", credit=1) as lucky:
        async with it.worker("unlucky", "k2", credit=1) as unlucky:
            await it.publish("b", key="k2")
            got = receipts(await unlucky.deliveries(1))
            await unlucky.send("ack", receipts=got)
            assert await unlucky.closed() == 1011
        await it.reaches("k2", waiting=1)
        await it.publish("a")
        await lucky.deliveries(1)
    await eventually(lambda: len(it.context.registry) == 0)

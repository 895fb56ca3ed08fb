"""The capability ``handover``: a worker that reconnects keeps its deliveries."""

from __future__ import annotations

from taskqueue_conformance.bench import Bench, ids
from taskqueue_conformance.harness import Harness
from taskqueue_core.backend import Capability
from taskqueue_core.tasks import Settled


class HandoverSuite(Harness, needs=(Capability.HANDOVER,)):
    """Tests of `Handover.adopt`."""

    async def test_adopt(self, bench: Bench) -> None:
        """An adopted delivery keeps its receipt when its old subscription is closed (law 2; D7)."""
        old, delivery, returned = await bench.all_running("t1", "t2")
        new = bench.subscribe()
        (adopted,) = await bench.adopt(new, delivery.receipt)
        assert adopted is not None
        assert (adopted.task, adopted.receipt) == (delivery.task, delivery.receipt)
        assert (adopted.attempt, adopted.losses) == (1, 0), (
            "an adoption was counted as an attempt or a loss (law 3)"
        )
        await old.close()
        assert ids(await bench.take(new, 2)) == [returned.task.id]
        assert await new.ack(delivery) == (Settled.OK,)
        await bench.expect(done=1, in_flight=1)

    async def test_new_owner_releases(self, bench: Bench) -> None:
        """An adopted delivery is released when its new subscription is closed (law 3)."""
        old, delivery = await bench.running("t1")
        new = bench.subscribe()
        await bench.adopt(new, delivery.receipt)
        await new.close()
        again = await bench.one(old)
        assert (again.task.id, again.attempt, again.losses) == ("t1", 1, 0)

    async def test_former_owner_loses_nothing(self, bench: Bench) -> None:
        """The old subscription cannot report an adopted delivery as lost (law 2; OPEN-A7)."""
        old, delivery = await bench.running("t1")
        new = bench.subscribe()
        await bench.adopt(new, delivery.receipt)
        await bench.stale(old.redeliver(delivery, lost=True))
        assert await new.ack(delivery) == (Settled.OK,)
        await bench.expect(done=1)

    async def test_identity_is_checked(self, bench: Bench) -> None:
        """A worker cannot adopt another worker's delivery, even with its receipt (law 2; OPEN-A7)."""
        await bench.publish("t1")
        owner = bench.subscribe(consumer="owner")
        delivery = await bench.one(owner)
        thief = bench.subscribe(consumer="thief")
        assert await bench.adopt(thief, delivery.receipt) == (None,)
        await thief.close()
        assert await bench.take(bench.subscribe(consumer="other")) == []
        assert await owner.ack(delivery) == (Settled.OK,)

    async def test_keys_are_checked(self, bench: Bench) -> None:
        """A delivery whose key is not allowed stays with its owner (law 2; Security 2)."""
        old, delivery = await bench.running("t1")
        new = bench.subscribe()
        asked: list[str] = []

        def refuse(key: str) -> bool:
            asked.append(key)
            return False

        assert await bench.adopt(new, delivery.receipt, allowed=refuse) == (None,)
        assert asked == [delivery.task.key]
        await new.close()
        await bench.expect(in_flight=1)
        assert await old.ack(delivery) == (Settled.OK,)

    async def test_stale_receipts(self, bench: Bench) -> None:
        """``adopt`` answers each receipt separately, with ``None`` for stale and unknown receipts (law 2)."""
        old, acked, returned, live = await bench.all_running("t1", "t2", "t3")
        new = bench.subscribe()
        await old.ack(acked)
        await old.redeliver(returned)
        answers = await bench.adopt(new, acked.receipt, "garbage", live.receipt, returned.receipt)
        assert [answer and answer.task.id for answer in answers] == [None, None, "t3", None]
        await bench.expect(done=1, waiting=1, in_flight=1)

    async def test_after_the_close(self, bench: Bench) -> None:
        """A delivery that was released by a close cannot be adopted (law 2)."""
        old, delivery = await bench.running("t1")
        new = bench.subscribe()
        await old.close()
        assert await bench.adopt(new, delivery.receipt) == (None,)
        assert ids(await bench.take(new, 2)) == ["t1"]

    async def test_twice(self, bench: Bench) -> None:
        """Adopting a delivery again changes nothing."""
        old, delivery = await bench.running("t1")
        new = bench.subscribe()
        for _ in range(2):
            (adopted,) = await bench.adopt(new, delivery.receipt)
            assert adopted is not None
            assert adopted.receipt == delivery.receipt
        assert await bench.adopt(new) == ()
        await bench.expect(in_flight=1)
        assert await old.ack(delivery) == (Settled.OK,)

    async def test_losses_travel(self, bench: Bench) -> None:
        """An adopted delivery keeps its attempt and its losses."""
        await bench.publish("t1")
        old, new = bench.subscribe(), bench.subscribe()
        await old.redeliver(await bench.one(old), lost=True)
        delivery = await bench.one(old)
        (adopted,) = await bench.adopt(new, delivery.receipt)
        assert adopted is not None
        assert adopted.losses == delivery.losses == 1

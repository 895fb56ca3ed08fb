"""Invalid arguments are refused with an error that names the field, and change nothing."""

from __future__ import annotations

import pytest

from taskqueue_conformance.bench import KEY, Bench
from taskqueue_conformance.harness import Harness
from taskqueue_core.backend import Capability
from taskqueue_core.errors import InvalidInput, TooLarge
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import Settled


class InputsSuite(Harness):
    """Tests of arguments that the constructor of `Task` does not check."""

    async def test_limit_of_a_receive(self, bench: Bench) -> None:
        """Receiving 0 or fewer tasks, or more than `Limits.call`, raises `InvalidInput`, which names ``limit``."""
        subscription = bench.subscribe()
        for limit in (0, -1, LIMITS.call + 1):
            await bench.invalid("limit", subscription.receive(limit, 0))
        await bench.publish("t1")
        assert len((await subscription.receive(LIMITS.call, 0)).deliveries) == 1

    async def test_size_of_a_call(self, bench: Bench) -> None:
        """A call with too many tasks, deliveries or receipts raises `InvalidInput` and changes nothing (law 2)."""
        subscription, delivery = await bench.running("t1")
        many, tasks = LIMITS.call + 1, [bench.task("t2")]
        await bench.invalid("tasks", bench.backend.publisher.publish(*tasks * many))
        await bench.invalid("deliveries", subscription.ack(*[delivery] * many))
        await bench.invalid("deliveries", subscription.redeliver(*[delivery] * many))
        if Capability.HANDOVER in bench.backend.capabilities.names:
            await bench.invalid("receipts", bench.adopt(subscription, *[delivery.receipt] * many))
        await bench.expect(in_flight=1)
        assert await subscription.ack(delivery) == (Settled.OK,)

    async def test_large_calls(self, bench: Bench) -> None:
        """One call can publish or settle more than a thousand tasks, which are received in order (laws 1, 4)."""
        names = [f"t{n}" for n in range(LIMITS.batch + 200)]
        await bench.publish(*names)
        subscription = bench.subscribe()
        taken = await bench.take(subscription, len(names))
        assert [delivery.task.id for delivery in taken] == names
        assert set(await subscription.redeliver(*taken)) == {Settled.OK}
        taken = await bench.take(subscription, len(names))
        assert [delivery.task.id for delivery in taken] == names
        assert set(await subscription.ack(*taken)) == {Settled.OK}
        await bench.expect(done=len(names))

    async def test_keys(self, bench: Bench) -> None:
        """A subscription refuses an empty list of keys, too many keys, and invalid keys."""
        long, many = "x" * (LIMITS.name + 1), [f"k{n}" for n in range(LIMITS.keys + 1)]
        for keys in ([], [""], ["a b"], [KEY, "a/b"], ["{tag}"], [long], many):
            with pytest.raises(InvalidInput):
                bench.backend.subscribe(keys, "worker")

    async def test_repeated_keys(self, bench: Bench) -> None:
        """A key that is listed twice counts once."""
        await bench.publish("t1")
        assert len(await bench.take(bench.subscribe(KEY, KEY), 2)) == 1

    async def test_consumer(self, bench: Bench) -> None:
        """A subscription refuses an invalid worker id."""
        for consumer in ("", "a b", "x" * (LIMITS.name + 1)):
            with pytest.raises(InvalidInput):
                bench.backend.subscribe([KEY], consumer)

    async def test_results_of_an_ack(self, bench: Bench) -> None:
        """An ack takes one JSON text within `Limits.result` per delivery; otherwise, nothing is settled (law 2)."""
        subscription, *taken = await bench.all_running("t1", "t2")
        for results in ([b"1"], [b"1", b"2", b"3"], [b"1", b"{broken"], [b"1", b"\xff"]):
            with pytest.raises(InvalidInput):
                await subscription.ack(*taken, results=results)
        large = b'"' + b"x" * (LIMITS.result - 2) + b'"'
        with pytest.raises(TooLarge, match="limit result"):
            await subscription.ack(*taken, results=[large, large + b" "])
        await bench.expect(in_flight=2)
        assert await subscription.ack(*taken, results=[large, None]) == (Settled.OK, Settled.OK)

    async def test_time_of_a_retry(self, bench: Bench) -> None:
        """The time of a retry must be finite and not negative; otherwise, nothing is scheduled (law 2)."""
        subscription, delivery = await bench.running("t1")
        for at in (float("nan"), float("inf"), -1.0):
            with pytest.raises(InvalidInput):
                await bench.backend.publisher.schedule_retry(delivery.task, at, settles=delivery)
        assert await subscription.ack(delivery) == (Settled.OK,)

"""A store that fails within a step, or carries out a commit but reports an error.

These tests apply to classes that define `Harness.failing` or `Harness.unanswered`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable

from taskqueue_conformance.bench import KEY, Bench, ids
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import needs
from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import has
from taskqueue_core.errors import BackendUnavailable, PublishUnconfirmed
from taskqueue_core.tasks import Published, Settled

_WRITES = 60
"""number of writes that are more than enough for each call in these tests"""


class FaultsSuite(Harness):
    """Tests of errors of the store."""

    @needs("failing")
    async def test_publish_that_fails_stores_nothing(self, bench: Bench) -> None:
        """A publish of several tasks that fails at any write leaves no trace (law 1)."""
        await bench.publish("before")

        async def publish(name: str) -> None:
            await bench.offer(f"{name}a", f"{name}b")

        failures = await _fail_at_each_write(bench, publish)
        count = failures + 1
        taken = ids(await bench.take(bench.subscribe(), 3 * count))
        assert taken == ["before", f"n{failures}a", f"n{failures}b"], (
            f"publishes that failed left tasks (law 1): {taken}"
        )

    @needs("failing")
    async def test_settlement_that_fails_changes_nothing(self, bench: Bench) -> None:
        """An ack, a release or a retry that fails at any write changes nothing, and can be repeated (laws 1, 2)."""
        for count, verb in enumerate(("ack", "redeliver", "retry"), 1):
            subscription, delivery = await bench.running(f"{verb}1")

            async def settle(_: str, verb: str = verb) -> None:
                if verb == "retry":
                    await bench.retry(delivery.task, settles=delivery)  # noqa: B023 - it is called before ``delivery`` changes
                else:
                    await getattr(subscription, verb)(delivery)  # noqa: B023 - it is called before ``delivery`` changes

            await _fail_at_each_write(bench, settle)
            if verb != "ack":
                (again,) = await bench.take(subscription, 2)
                assert again.attempt == (2 if verb == "retry" else 1)
                assert await subscription.ack(again) == (Settled.OK,)
            assert await bench.take(subscription) == []
            await bench.expect(done=count)
            await subscription.close()

    @needs("failing")
    async def test_receive_that_fails_loses_nothing(self, bench: Bench) -> None:
        """If a receive fails at any write, its tasks are still waiting, and no loss is counted (laws 1, 3)."""
        await bench.publish("t1", "t2")
        subscription = bench.subscribe()
        await bench.take(subscription, 2)
        await subscription.close()
        subscription, taken = bench.subscribe(), list[tuple[str, int, int]]()

        async def receive(_: str) -> None:
            for delivery in (await subscription.receive(2, 0)).deliveries:
                taken.append((delivery.task.id, delivery.attempt, delivery.losses))

        await _fail_at_each_write(bench, receive)
        assert taken == [("t1", 1, 0), ("t2", 1, 0)]

    @needs("unanswered")
    async def test_publish_without_an_answer(self, bench: Bench) -> None:
        """A stored publish with a lost answer must not raise `BackendUnavailable`; a resend is a duplicate (law 7)."""
        task = bench.task("t1")
        await bench.publish("before")
        error: BackendUnavailable | PublishUnconfirmed | None = None
        with bench.harness.unanswered(bench.backend):
            try:
                assert await bench.statuses(task) == [Published.ACCEPTED]
            except (BackendUnavailable, PublishUnconfirmed) as failure:
                error = failure
        (again,) = await bench.statuses(task)
        if isinstance(error, BackendUnavailable):  # says that the publish did not reach the store
            assert again is Published.ACCEPTED, (
                "the task is stored, so the error must be PublishUnconfirmed: "
                "got BackendUnavailable (law 7)"
            )
        else:
            assert again is Published.DUPLICATE
        assert ids(await bench.take(bench.subscribe(), 3)) == ["before", "t1"]

    @needs("unanswered")
    async def test_settlement_without_an_answer(self, bench: Bench) -> None:
        """An ack whose answer is lost can be repeated, and takes effect once (laws 1, 2)."""
        subscription, delivery = await bench.running("t1")
        with bench.harness.unanswered(bench.backend):
            await _unavailable(subscription.ack(delivery))
        assert await subscription.ack(delivery) == (Settled.OK,)
        await bench.expect(done=1)

    @needs("unanswered")
    async def test_receive_without_an_answer(self, bench: Bench) -> None:
        """If the answer to a receive is lost, a later one delivers its tasks without counting a loss (laws 1, 3)."""
        subscription = await bench.subscribed("t1", "t2")
        with bench.harness.unanswered(bench.backend):
            await _unavailable(subscription.receive(2, 0))
        taken = await bench.eventually(subscription, 2)
        if taken:  # otherwise the receive had an answer despite the fault
            assert [(d.task.id, d.losses) for d in taken] == [("t1", 0), ("t2", 0)]
        await subscription.close()
        taken = await bench.eventually(bench.subscribe(), 2)
        assert [(d.task.id, d.losses) for d in taken] == [("t1", 0), ("t2", 0)]


async def _fail_at_each_write(bench: Bench, call: Callable[[str], Awaitable[None]]) -> int:
    """Repeat a call on a store that fails at the first write, then at the second, and so on, until the call succeeds.

    Return the number of failures. After each failure, the ledger must be as it was before.
    """
    for writes in range(_WRITES):
        before = await _ledger(bench)
        with bench.harness.failing(bench.backend, writes):
            try:
                await call(f"n{writes}")
            except BackendUnavailable:
                pass
            else:
                assert writes, "the call made no write: `failing` must make the store fail"
                return writes
        after = await _ledger(bench)
        assert after == before, (
            f"a call that failed at write {writes + 1} changed the ledger (law 1): "
            f"expected {before}, got {after}"
        )
    raise AssertionError(f"the call failed, although the store carried out {_WRITES} writes")


async def _ledger(bench: Bench) -> object:
    if has(bench.backend, Capability.CONTROL):
        return await bench.control.ledger(KEY)
    return None


async def _unavailable(call: Awaitable[object]) -> None:
    """Await a call that may raise `BackendUnavailable`, because its answer was lost."""
    with contextlib.suppress(BackendUnavailable):
        await call

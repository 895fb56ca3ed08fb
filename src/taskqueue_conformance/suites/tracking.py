"""The capability ``control``: the statuses, results and progress of tasks."""

from __future__ import annotations

from taskqueue_conformance.bench import KEY, OTHER, Bench
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import needs
from taskqueue_core.backend import Capability
from taskqueue_core.consumer.settle import settle
from taskqueue_core.retry import ScheduleRetry
from taskqueue_core.tasks import State, TaskStatus

_ROUNDING = 1e-3
"""seconds by which a store may round a time"""


class TrackingSuite(Harness, needs=(Capability.CONTROL,)):
    """Tests of `Control.statuses`, `Control.results` and `Control.progress`."""

    @needs("atomic_retry")
    async def test_states(self, bench: Bench) -> None:
        """The status of a task shows its state, attempt, losses and last failure at every step (C26)."""
        due = bench.now + bench.short
        subscription = await bench.subscribed("t1", not_before=due)
        status = await _status(bench)
        assert status.state is State.SCHEDULED
        assert abs((status.due_at or 0) - due) < _ROUNDING, (
            "a scheduled task must have its due time"
        )
        await bench.advance(bench.short)
        await bench.control.maintain()
        status = await _status(bench)
        assert (status.state, status.due_at) == (State.WAITING, None)
        delivery = await bench.one(subscription)
        status = await _status(bench)
        assert (status.state, status.attempt, status.losses) == (State.IN_FLIGHT, 1, 0)
        assert (status.key, status.task_id) == (KEY, "t1")
        await subscription.redeliver(delivery, lost=True)
        status = await _status(bench)
        assert (status.state, status.attempt, status.losses) == (State.WAITING, 1, 1)
        delivery = await bench.one(subscription)
        await settle(bench.backend, subscription, delivery, ScheduleRetry(bench.short, "boom"))
        status = await _status(bench)
        assert (status.state, status.attempt, status.error) == (State.SCHEDULED, 2, "boom")
        assert status.due_at is not None, "a task that waits for a retry must have its due time"
        assert status.due_at <= bench.now + bench.short + _ROUNDING
        assert status.last_failure is not None, "a retried task must have its last failure"
        assert (status.last_failure.attempt, status.last_failure.error) == (1, "boom")
        await bench.advance(bench.short)
        await subscription.ack(await bench.one(subscription))
        status = await _status(bench)
        assert (status.state, status.attempt) == (State.DONE, 2)
        assert status.error is None, "a done task must have no error"
        assert status.last_failure is not None, "a done task must have its last failure"
        assert status.last_failure.error == "boom"
        assert status.updated_at <= bench.now

    @needs(Capability.DEAD_LETTERS)
    async def test_dead_state(self, bench: Bench) -> None:
        """A dead letter's status has the error; its state is waiting after a redrive, and discarded after a discard."""
        subscription, delivery = await bench.running("t1")
        await bench.bury(subscription, delivery, "poison")
        status = await _status(bench)
        assert status.state is State.DEAD
        assert status.error == "poison", "the error of a dead task must be the reason"
        assert status.last_failure is not None, "a dead task must have its last failure"
        assert status.last_failure.error == "poison: details"
        await bench.dead_letters.redrive(KEY, "t1")
        assert (await _status(bench)).state is State.WAITING
        await bench.bury(subscription, await bench.one(subscription))
        await bench.dead_letters.discard(KEY, "t1")
        assert (await _status(bench)).state is State.DISCARDED

    async def test_many_and_unknown(self, bench: Bench) -> None:
        """Statuses come in the order of the ids, with ``None`` for an id that the queue does not know."""
        await bench.publish("t1", "t2")
        statuses = await bench.control.statuses(KEY, "t2", "unknown", "t1", "t2")
        assert [status and status.task_id for status in statuses] == ["t2", None, "t1", "t2"]
        assert await bench.control.statuses(OTHER, "t1") == (None,)
        assert await bench.control.statuses(KEY) == ()

    async def test_results(self, bench: Bench) -> None:
        """The result of each acked delivery is stored unchanged; it is ``None`` if there was no result."""
        subscription = await bench.subscribed("t1", "t2", "t3", "t4")
        delivery, two, three = await bench.take(subscription, 3)
        assert await bench.control.results(KEY, "t1") == (None,), "a running task has a result"
        await subscription.ack(delivery, two, results=[b'{"a": [1, null]}', None])
        await subscription.ack(three)
        results = await bench.control.results(KEY, "t3", "t1", "t4", "t2", "unknown")
        assert results == (None, b'{"a": [1, null]}', None, None, None)

    async def test_resent_ack_keeps_the_result(self, bench: Bench) -> None:
        """The result of the first ack is kept even if a repeated ack has another result (law 2)."""
        subscription, delivery = await bench.running("t1")
        await subscription.ack(delivery, results=[b"1"])
        await subscription.ack(delivery, results=[b"2"])
        assert await bench.control.results(KEY, "t1") == (b"1",)

    async def test_result_ttl(self, bench: Bench) -> None:
        """A result is kept for ``result_ttl`` seconds, and no longer."""
        await bench.configure(result_ttl=2 * bench.short)
        subscription, delivery = await bench.running("t1")
        await subscription.ack(delivery, results=[b"1"])
        await bench.advance(bench.short)
        await bench.control.maintain()
        assert await bench.control.results(KEY, "t1") == (b"1",)
        await bench.advance(bench.short * 1.5)
        assert await bench.control.results(KEY, "t1") == (None,)

    async def test_result_outlives_the_window(self, bench: Bench) -> None:
        """A result is kept for ``result_ttl`` even if ``dedupe_window`` is shorter."""
        await bench.configure(dedupe_window=bench.short / 2, result_ttl=3600)
        subscription, delivery = await bench.running("t1")
        await subscription.ack(delivery, results=[b"1"])
        await bench.advance(bench.short)
        await bench.control.maintain()
        assert await bench.control.results(KEY, "t1") == (b"1",)

    async def test_progress(self, bench: Bench) -> None:
        """The status shows a running task's progress as a number or text; a stale receipt changes nothing (law 2)."""
        subscription, old = await bench.running("t1")
        await subscription.redeliver(old)
        delivery = await bench.one(subscription)
        values: tuple[float | str, ...] = (0.25, "half-way: 50 %", 1.0)
        for value in values:
            assert await bench.control.progress(delivery, value)
            assert (await _status(bench)).progress == value
        assert not await bench.control.progress(old, 0.0)
        assert (await _status(bench)).progress == 1.0
        await subscription.ack(delivery)
        assert not await bench.control.progress(delivery, 0.5)


async def _status(bench: Bench) -> TaskStatus:
    (status,) = await bench.control.statuses(KEY, "t1")
    assert status is not None, "expected the status of a task that the store knows, got None"
    return status

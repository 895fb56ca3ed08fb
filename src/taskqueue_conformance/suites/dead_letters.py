"""The capability ``dead_letters``: a dead letter is kept until an operator redrives or discards it."""

from __future__ import annotations

from taskqueue_conformance.bench import KEY, OTHER, Bench, ids
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import needs
from taskqueue_core.backend import Capability
from taskqueue_core.consumer.settle import settle
from taskqueue_core.limits import LIMITS
from taskqueue_core.retry import Bury, ScheduleRetry
from taskqueue_core.tasks import DeadLetter, Settled


class DeadLettersSuite(Harness, needs=(Capability.DEAD_LETTERS,)):
    """Tests of `DeadLettering` and `DeadLetters`."""

    async def test_dead_letter(self, bench: Bench) -> None:
        """One call ends a delivery and stores its task as a dead letter, with reason and error (laws 1, 2; D3)."""
        subscription, delivery = await bench.running("t1", headers={"a": "b"})
        assert (await bench.bury(subscription, delivery, "poison")).ok
        (dead_letter,) = await bench.dead_letters.list(KEY)
        assert (dead_letter.task, dead_letter.attempt) == (delivery.task, 1)
        assert dead_letter.losses == 0
        assert dead_letter.reason == "poison"
        assert dead_letter.failed_at >= delivery.delivered_at
        assert [failure.error for failure in dead_letter.history] == ["poison: details"]
        assert await bench.take(subscription) == [], "a dead task was delivered (law 2)"
        await bench.expect(dead=1)

    async def test_receipt_ends(self, bench: Bench) -> None:
        """Dead-lettering can be repeated; other settlements of the same receipt are refused (law 2)."""
        subscription, first, second = await bench.all_running("t1", "t2")
        await bench.bury(subscription, first)
        assert (await bench.bury(subscription, first)).ok
        await bench.stale(subscription.ack(first))
        await subscription.ack(second)
        await bench.stale(bench.bury(subscription, second))
        await bench.expect(dead=1, done=1)

    async def test_history(self, bench: Bench) -> None:
        """A dead letter keeps its last failures, oldest first, each with its attempt and time."""
        subscription = await bench.subscribed("t1")
        for error in ("first", "second"):
            delivery = await bench.one(subscription)
            await settle(bench.backend, subscription, delivery, ScheduleRetry(bench.short, error))
            await bench.advance(bench.short)
        await bench.bury(subscription, await bench.one(subscription), "third")
        (dead_letter,) = await bench.dead_letters.list(KEY)
        history = [(failure.attempt, failure.error) for failure in dead_letter.history]
        assert history == [(1, "first"), (2, "second"), (3, "third: details")]
        assert dead_letter.attempt == 3
        times = [failure.at for failure in dead_letter.history]
        assert times == sorted(times)
        assert times[-1] <= dead_letter.failed_at

    async def test_tracebacks(self, bench: Bench) -> None:
        """The last 3 failures of a task keep the ends of their tracebacks, from retries and the dead letter (U10)."""
        subscription = await bench.subscribed("t1")
        for number in (1, 2, 3):
            delivery = await bench.one(subscription)
            verb = ScheduleRetry(0, "failed", traceback=f"Traceback {number}")
            await settle(bench.backend, subscription, delivery, verb)
        long = "é" * LIMITS.traceback + "\nValueError: x"
        last = await bench.one(subscription)
        burial = Bury("bad", "details", long)
        assert await settle(bench.backend, subscription, last, burial) is Settled.OK
        (dead_letter,) = await bench.dead_letters.list(KEY)
        kept = [failure.traceback for failure in dead_letter.history]
        assert kept[:3] == [None, "Traceback 2", "Traceback 3"], "the last 3 tracebacks are kept"
        end = (kept[3] or "").encode()
        assert long.encode().endswith(end), "the end of a traceback must be kept"
        assert LIMITS.traceback - 1 <= len(end) <= LIMITS.traceback, "a traceback was cut wrongly"

    async def test_poison_guard(self, bench: Bench) -> None:
        """A task that is lost too many times becomes a dead letter with a reason, and keeps its attempt (law 3)."""
        subscription = await bench.subscribed("t1")
        losses, outcome = 0, Settled.OK
        while outcome is Settled.OK and losses <= 1000:
            (outcome,) = await subscription.redeliver(await bench.one(subscription), lost=True)
            losses += 1
        assert outcome is Settled.DEAD, f"a task that was lost {losses} times is alive (law 3)"
        assert await bench.take(subscription) == []
        (dead_letter,) = await bench.dead_letters.list(KEY)
        assert dead_letter.attempt == 1
        assert dead_letter.losses >= 1
        assert dead_letter.reason
        await bench.expect(dead=1)

    @needs(Capability.CONTROL)
    async def test_poison_guard_counts_to_its_setting(self, bench: Bench) -> None:
        """A task survives exactly ``max_losses`` losses; the current value of the setting applies (laws 3, 9)."""
        await bench.configure(max_losses=2)
        subscription = await bench.subscribed("t1")
        for _ in range(2):
            delivery = await bench.one(subscription)
            assert await subscription.redeliver(delivery, lost=True) == (Settled.OK,)
        delivery = await bench.one(subscription)
        assert await subscription.redeliver(delivery, lost=True) == (Settled.DEAD,)
        assert (await subscription.redeliver(delivery, lost=True))[0].ok, "a repetition was refused"
        assert await _listed(bench) == ["t1"]
        await bench.expect(dead=1)

    async def test_list_is_paged(self, bench: Bench) -> None:
        """Dead letters are listed for each queue, oldest first, page by page (C17)."""
        await bench.publish(*(f"t{n}" for n in range(5)))
        await bench.publish("other", key=OTHER)
        subscription = bench.subscribe(KEY, OTHER)
        buried = sorted(await bench.take(subscription, 6), key=lambda delivery: delivery.task.id)
        for delivery in reversed(buried):
            await bench.bury(subscription, delivery)
            await bench.advance(bench.short / 10)
        pages, after = [], None
        while page := await bench.dead_letters.list(KEY, limit=2, after=after):
            pages.append([dead_letter.task.id for dead_letter in page])
            after = page[-1].task.id
        assert pages == [["t4", "t3"], ["t2", "t1"], ["t0"]]
        assert await bench.dead_letters.list("unknown") == ()
        for dead_letter in await bench.dead_letters.list(KEY):
            assert await bench.dead_letters.get(KEY, dead_letter.task.id) == dead_letter
        assert await bench.dead_letters.get(KEY, "other") is None
        assert await bench.dead_letters.get("unknown", "t0") is None

    async def test_redrive(self, bench: Bench) -> None:
        """A redriven task keeps its attempt and has 0 losses; ``prior`` counts its earlier attempts (law 1; C17)."""
        subscription, delivery = await bench.running("t1")
        await settle(bench.backend, subscription, delivery, ScheduleRetry(0, "failed"))
        await subscription.redeliver(await bench.one(subscription), lost=True)
        delivery = await bench.one(subscription)
        assert (delivery.attempt, delivery.losses) == (2, 1)
        await bench.bury(subscription, delivery)
        assert await bench.dead_letters.redrive(KEY, "t1") == 1
        again = await bench.one(subscription)
        assert (again.attempt, again.losses) == (2, 0)
        assert 0 < again.prior <= 2, "prior must count the attempts that were spent before"
        assert await bench.dead_letters.list(KEY) == ()

    async def test_redriven_goes_last(self, bench: Bench) -> None:
        """A redriven task goes to the end of its lane (law 4)."""
        subscription, delivery = await bench.running("t1", "t2")
        await bench.bury(subscription, delivery)
        await bench.publish("t3")
        await bench.dead_letters.redrive(KEY, "t1")
        await bench.publish("t4")
        assert ids(await bench.take(subscription, 4)) == ["t2", "t3", "t1", "t4"]

    async def test_redrive_all_and_some(self, bench: Bench) -> None:
        """Without ids, all dead letters of a queue are redriven; ids of tasks that are not dead are ignored (C17)."""
        await _buried(bench, 4)
        assert await bench.dead_letters.redrive(KEY, "t1", "unknown", "t1") == 1
        assert await bench.dead_letters.redrive(KEY, "t1") == 0, "redrive is not idempotent"
        assert await bench.dead_letters.redrive(OTHER) == 0
        assert await bench.dead_letters.redrive(KEY) == 3
        assert await bench.dead_letters.redrive(KEY) == 0
        await bench.expect(waiting=4)

    async def test_discard(self, bench: Bench) -> None:
        """Discarded dead letters are deleted, but are still counted in the ledger (law 1; C17, C26)."""
        await _buried(bench, 3)
        assert await bench.dead_letters.discard(KEY, "t0", "unknown") == 1
        assert await bench.dead_letters.discard(KEY, "t0") == 0, "discard is not idempotent"
        assert await bench.dead_letters.redrive(KEY, "t0") == 0
        assert await _listed(bench) == ["t1", "t2"]
        assert await bench.dead_letters.discard(KEY) == 2
        await bench.expect(discarded=3)

    @needs(Capability.CONTROL)
    async def test_nothing_expires(self, bench: Bench) -> None:
        """A dead letter outlives the dedupe window and the deadline of its task (C26)."""
        await bench.configure(dedupe_window=bench.short / 2)
        dead_letters = await _buried(bench, 2, deadline=bench.now + 5 * bench.short)
        await bench.advance(6 * bench.short)
        await bench.control.maintain()
        assert await bench.dead_letters.list(KEY) == dead_letters
        await bench.expect(dead=2)


async def _listed(bench: Bench) -> list[str]:
    return [dead_letter.task.id for dead_letter in await bench.dead_letters.list(KEY)]


async def _buried(bench: Bench, count: int, **fields: float) -> tuple[DeadLetter, ...]:
    subscription = await bench.subscribed(*(f"t{n}" for n in range(count)), **fields)
    for delivery in await bench.take(subscription, count):
        await bench.bury(subscription, delivery)
    return await bench.dead_letters.list(KEY)

"""Digests of contents: an id is recognised by the digest, although the payload has other bytes each time."""

from __future__ import annotations

from taskqueue_conformance.bench import KEY, Bench, ids
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import needs
from taskqueue_conformance.suites.fan_out import bound
from taskqueue_core.backend import Capability
from taskqueue_core.tasks import Published, Task
from taskqueue_core.uniqueness import UniqueKey

_NEW, _KNOWN, _CONFLICT = Published.ACCEPTED, Published.DUPLICATE, Published.CONFLICT
_DIGEST, _OTHER_DIGEST = b"d" * 32, b"e" * 32
_LONG = "x" * 2000


class ContentDigestSuite(Harness):
    """Tests of the field ``content_digest`` of a task."""

    async def test_digest_of_the_same_content(self, bench: Bench) -> None:
        """A task with the same id and digest is a duplicate, whatever its payload is (law 7)."""
        first, again = _task(bench, "t1", "one"), _task(bench, "t1", "two")
        longest = _task(bench, "t2", "three", digest=b"l" * 64)
        shortest = _task(bench, "t3", "four", digest=b"s" * 16)
        statuses = await bench.statuses(first, again, longest, shortest)
        assert statuses == [_NEW, _KNOWN, _NEW, _NEW]
        assert await bench.statuses(again) == [_KNOWN], (
            "an honest repetition is no duplicate (law 7)"
        )
        taken = await bench.take(bench.subscribe(), 4)
        assert [each.task for each in taken] == [first, longest, shortest], "not as published"

    async def test_digest_of_another_content(self, bench: Bench) -> None:
        """Another digest is a conflict, even with the same payload; so is a task without a digest (law 7)."""
        await bench.offer(_task(bench, "t1", "same"), bench.task("t2", payload="same"))
        other = _task(bench, "t1", "same", digest=_OTHER_DIGEST)
        with_digest = _task(bench, "t2", "same")
        without = bench.task("t1", payload="same")
        statuses = await bench.statuses(other, with_digest, without)
        assert statuses == [_CONFLICT] * 3, "tasks with different digests count as equal (law 7)"
        assert ids(await bench.take(bench.subscribe(), 3)) == ["t1", "t2"]

    async def test_digest_known_in_every_state(self, bench: Bench) -> None:
        """The digest is remembered while a task is scheduled, in flight and released, and after its end (law 7)."""
        subscription = bench.subscribe()
        await bench.offer(_task(bench, "later", "one", not_before=bench.now + 3600))
        await _repeated(bench, "later")
        await bench.offer(_task(bench, "t1", _LONG))
        delivery = await bench.one(subscription)
        await _repeated(bench, "t1")
        await subscription.redeliver(delivery)
        await _repeated(bench, "t1")
        await subscription.ack(await bench.one(subscription))
        await _repeated(bench, "t1")
        assert await bench.take(subscription) == [], "an executed task was delivered again (law 7)"

    @needs(Capability.DEAD_LETTERS, Capability.CONTROL)
    async def test_digest_known_when_dead(self, bench: Bench) -> None:
        """The digest of a dead letter is kept, also when it is redriven and when it is cancelled then (law 7)."""
        subscription, task = bench.subscribe(), _task(bench, "t1", _LONG)
        await bench.offer(task)
        await bench.bury(subscription, await bench.one(subscription))
        await _repeated(bench, "t1")
        letter = await bench.dead_letters.get(KEY, "t1")
        assert letter is not None
        assert letter.task == task
        assert await bench.dead_letters.redrive(KEY, "t1") == 1
        await _repeated(bench, "t1")
        assert (await bench.one(subscription)).task == task
        assert await bench.control.cancel(KEY, "t1")
        await _repeated(bench, "t1")

    @needs(Capability.FAN_OUT, Capability.CONTROL)
    async def test_digest_of_copies(self, bench: Bench) -> None:
        """The copies in the queues of a fan-out are recognised by the digest, too (law 7)."""
        first, second = await bound(bench, 2)
        await bench.offer(_task(bench, "t1", "one"))
        await _repeated(bench, "t1")
        assert await bench.statuses(_task(bench, "t1", "two", key=first)) == [_KNOWN]
        assert len(await bench.take(bench.subscribe(first, second), 3)) == 2

    @needs(Capability.UNIQUE)
    async def test_digest_of_a_replaced_task(self, bench: Bench) -> None:
        """After a replacement, both ids are recognised by the digests that they were published with (law 7)."""
        unique = UniqueKey(key="work", on_conflict="replace")
        await bench.offer(_task(bench, "t1", "one", unique=unique))
        newer = _task(bench, "t2", "two", digest=_OTHER_DIGEST, unique=unique)
        assert await bench.statuses(newer) == [Published.REPLACED]
        await _repeated(bench, "t1")
        again = _task(bench, "t2", "three", digest=_OTHER_DIGEST, unique=unique)
        assert await bench.statuses(again) == [Published.REPLACED]
        taken = await bench.take(bench.subscribe(), 2)
        assert [each.task.value() for each in taken] == ["two"]


def _task(
    bench: Bench, task_id: str, payload: str, *, digest: bytes = _DIGEST, **fields: object
) -> Task:
    return bench.task(task_id, payload=payload, content_digest=digest, **fields)


async def _repeated(bench: Bench, task_id: str) -> None:
    """Check that a task with the digest of `_task` is a duplicate, and one with another digest a conflict."""
    again = _task(bench, task_id, "encoded again")
    other = _task(bench, task_id, "encoded again", digest=_OTHER_DIGEST)
    statuses = await bench.statuses(again, other)
    assert statuses == [_KNOWN, _CONFLICT], f"the digest of {task_id} was forgotten (law 7)"

"""Tags of tasks, and lists of the tasks that have a tag which the queue indexes."""

from __future__ import annotations

from typing import Any

from taskqueue_conformance.bench import KEY, Bench, ids
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import needs
from taskqueue_conformance.suites.listing import NAMES, page_of, summaries, walk
from taskqueue_conformance.suites.streams import append, page
from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import Erasure, count_tagged, listing_of, streams_of
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import Published, State
from taskqueue_core.uniqueness import UniqueKey

TAG = "user:42"
MOST = tuple(f"größe {number}:" + "x" * 90 for number in range(LIMITS.tags))


async def _tagged(bench: Bench, **query: Any) -> list[str]:
    return await walk(bench, None, tag=TAG, **query)


class TagSuite(Harness):
    """Tests of `Task.tags`, which every backend keeps."""

    @needs("atomic_retry")
    async def test_tags_come_with_a_delivery(self, bench: Bench) -> None:
        """A task is delivered with its tags, also after a retry; a copy with other tags is a duplicate (law 7; U18)."""
        subscription, delivery = await bench.running("t1", tags=MOST)
        assert delivery.task.tags == MOST
        (again,) = await bench.offer(bench.task("t1", tags=("other",)))
        assert again.status is Published.DUPLICATE
        await bench.retry(delivery.task, settles=delivery)
        await bench.advance(bench.short)
        (delivery,) = await bench.eventually(subscription, 1)
        assert (delivery.attempt, delivery.task.tags) == (2, MOST)

    async def test_one_id_twice_in_a_publish(self, bench: Bench) -> None:
        """In one publish, a second task with the id of a task with tags is a duplicate or a conflict (law 7; U18)."""
        tagged, other = bench.task("t1", tags=MOST), bench.task("t1", payload="other")
        answers = await bench.offer(tagged, tagged, other)
        assert [answer.status for answer in answers] == [
            Published.ACCEPTED,
            Published.DUPLICATE,
            Published.CONFLICT,
        ]
        await bench.expect(published=1, waiting=1)


class ListingTagsSuite(Harness, needs=(Capability.LISTING, Capability.CONTROL)):
    """Tests of the setting ``index`` and of lists with a tag."""

    async def test_list_of_a_tag(self, bench: Bench) -> None:
        """All tasks with a tag are listed in the order of their publishes, in every state, with their tags (U18)."""
        await bench.configure(index=("user", "urgent"))
        for name in NAMES:
            await bench.publish(name, tags=(TAG, "urgent"), priority=int(name[1:]))
        await bench.publish("other", tags=("user:4", "user:421", "user", "urgent"))
        await bench.publish("none")
        subscription = bench.subscribe()
        (delivery,) = await bench.take(subscription, 1)
        await subscription.ack(delivery)
        assert await bench.control.cancel(KEY, "t3")
        assert await _tagged(bench) == list(NAMES), "the list of a tag is not as published (law 11)"
        assert await _tagged(bench, newest=True, limit=2) == list(NAMES[::-1])
        states = {task.task_id: task.state for task in await summaries(bench, None, tag=TAG)}
        assert (states["t3"], states["t6"], states["t0"]) == (
            State.CANCELLED,
            State.DONE,
            State.WAITING,
        )
        waiting = ["t0", "t1", "t2", "t4", "t5"]
        assert await walk(bench, State.WAITING, tag=TAG, limit=1) == waiting
        assert len(await walk(bench, None, tag="urgent")) == len(NAMES) + 1
        assert await walk(bench, None, tag="user:9") == []
        (found,) = await summaries(bench, None, tag="user:4")
        assert found.tags == ("user:4", "user:421", "user", "urgent")

    async def test_tags_that_the_queue_does_not_index(self, bench: Bench) -> None:
        """A tag is indexed by the setting of the time of the publish; one that is not is refused (U18)."""
        await bench.publish("t0", tags=(TAG,))
        await bench.configure(index=("user",))
        assert await _tagged(bench) == []
        await bench.publish("t1", tags=(TAG,))
        await bench.configure(index=("other",))
        await bench.invalid("tag", page_of(bench, None, tag=TAG))
        await bench.configure(index=("user", "other"))
        assert await _tagged(bench) == ["t1"]

    async def test_filters_of_a_tag(self, bench: Bench) -> None:
        """A tag may be combined with a tenant, and with a worker of tasks in flight (U18)."""
        await bench.configure(index=("user",))
        for name in NAMES:
            await bench.publish(name, tags=(TAG,), tenant="a" if name in ("t1", "t4") else "b")
        assert await _tagged(bench, tenant="a", limit=1) == ["t1", "t4"]
        await bench.take(bench.subscribe(consumer="w1"), 2)
        await bench.take(bench.subscribe(consumer="w2"), 1)
        in_flight = await walk(bench, State.IN_FLIGHT, tag=TAG, worker="w2")
        assert in_flight == ["t2"]

    async def test_the_most_tags(self, bench: Bench) -> None:
        """Each of the most and longest tags finds its task, and nothing of it is left when the record is gone (U18)."""
        await bench.configure(
            index=tuple(tag.partition(":")[0] for tag in MOST), dedupe_window=0, result_ttl=0
        )
        subscription, delivery = await bench.running("t0", tags=MOST)
        for tag in MOST:
            assert await walk(bench, None, tag=tag) == ["t0"]
        await subscription.ack(delivery)
        await bench.advance(bench.short)
        await bench.control.maintain()
        for tag in MOST:
            assert await page_of(bench, None, tag=tag) == await page_of(bench, None, tag=MOST[0])
            assert await walk(bench, None, tag=tag) == []

    async def test_tags_of_an_id_used_again(self, bench: Bench) -> None:
        """A new task with the id of an ended one is found by its own tags alone (U18)."""
        await bench.configure(index=("user",), dedupe_window=0)
        subscription, delivery = await bench.running("t0", tags=(TAG, "user:1"))
        await subscription.ack(delivery)
        await bench.advance(bench.short)
        await bench.publish("t0", tags=(TAG, "user:2"))
        assert await _tagged(bench) == ["t0"]
        assert await walk(bench, None, tag="user:1") == []
        assert await walk(bench, None, tag="user:2") == ["t0"]

    @needs("atomic_retry")
    async def test_tags_after_a_retry(self, bench: Bench) -> None:
        """A task that is retried is still found (U18)."""
        await bench.configure(index=("user",))
        _, delivery = await bench.running("t0", tags=(TAG,))
        await bench.retry(delivery.task, 600, settles=delivery)
        (found,) = await summaries(bench, None, tag=TAG)
        assert (found.state, found.attempt) == (State.SCHEDULED, 2)

    async def test_tags_of_a_retry_that_stores_the_task(self, bench: Bench) -> None:
        """The retry of a task that is unknown or has ended stores it, and it is found by its own tags alone (U18)."""
        await bench.configure(index=("user",))
        await bench.retry(bench.task("t0", tags=(TAG,)), 600)
        subscription, delivery = await bench.running("t1", tags=("user:1",))
        await subscription.ack(delivery)
        await bench.retry(bench.task("t1", tags=(TAG,)), 600)
        assert await _tagged(bench) == ["t0", "t1"]
        assert await walk(bench, None, tag="user:1") == []

    @needs(Capability.UNIQUE)
    async def test_tags_of_a_replacement(self, bench: Bench) -> None:
        """Contents that replace those of a task bring their own tags; the remembered id is on no list (U18)."""
        await bench.configure(index=("user",))
        unique = UniqueKey(key="k", on_conflict="replace")
        await bench.publish("t0", unique=unique, tags=(TAG, "user:1"))
        (answer,) = await bench.offer(bench.task("t1", unique=unique, tags=(TAG, "user:2")))
        assert (answer.status, answer.existing_id) == (Published.REPLACED, "t0")
        assert await _tagged(bench) == ["t0"]
        assert await walk(bench, None, tag="user:1") == []
        assert await walk(bench, None, tag="user:2") == ["t0"]
        assert await walk(bench, State.DISCARDED) == []
        assert await listing_of(bench.backend).task(KEY, "t1") is None

    @needs(Capability.DEAD_LETTERS)
    async def test_erasure_of_a_tag(self, bench: Bench) -> None:
        """An erasure ends the tasks with a tag in any state, leaves nothing of them, and keeps the others (law 11)."""
        await bench.configure(index=("user",), result_ttl=600, keep_ended=600)
        subscription, done = await bench.running("done", tags=(TAG,))
        await subscription.ack(done, results=[b"1"])
        _, dead = await bench.running("dead", tags=("urgent", TAG))
        await bench.bury(subscription, dead)
        await bench.publish("other", tags=("user:4",))
        kept = await bench.one(subscription)
        owner, running = await bench.running("running", tags=(TAG, "user:4"))
        await bench.publish("later", tags=(TAG,), not_before=bench.now + 600)
        await bench.publish("waiting", tags=(TAG,))
        listing = listing_of(bench.backend)
        names = ("done", "dead", "running", "later", "waiting")
        whole = dict.fromkeys(
            (State.DONE, State.DEAD, State.IN_FLIGHT, State.SCHEDULED, State.WAITING), 1
        )
        assert await count_tagged(listing, KEY, TAG) == Erasure(tasks=whole)
        first = await listing.erase(KEY, TAG, limit=2)
        assert (first.count, first.more) == (2, True)
        assert await _tagged(bench) == ["running", "later", "waiting"], "not in order of publish"
        rest = await listing.erase(KEY, TAG)
        assert (rest.count, rest.more) == (3, False)
        assert first.tasks | rest.tasks == whole, "each state must be the one before the erasure"
        assert await listing.erase(KEY, TAG) == Erasure()
        await bench.expect(in_flight=1, done=1, cancelled=3, discarded=1)
        assert await bench.control.statuses(KEY, *names) == (None,) * len(names)
        assert await bench.control.results(KEY, "done") == (None,)
        for state in (State.DONE, State.CANCELLED, State.DISCARDED, State.DEAD):
            assert await walk(bench, state) == [], (
                f"a list still has an erased task that was {state}"
            )
        assert await walk(bench, None, tag="user:4") == ["other"]
        await bench.stale(owner.ack(running))
        await subscription.ack(kept)
        answers = await bench.offer(*(bench.task(name, payload="new") for name in names))
        assert {answer.status for answer in answers} == {Published.ACCEPTED}, "an id is still known"
        await bench.control.maintain()
        await bench.expect(waiting=5, done=2, cancelled=3, discarded=1)

    async def test_erasure_needs_the_index(self, bench: Bench) -> None:
        """An erasure of a tag that the queue does not index is refused, as is an invalid limit (U18)."""
        await bench.publish("t0", tags=(TAG,))
        listing = listing_of(bench.backend)
        await bench.invalid("tag", listing.erase(KEY, TAG))
        await bench.configure(index=("user",))
        for limit in (0, 1001):
            await bench.invalid("limit", listing.erase(KEY, TAG, limit=limit))
        assert await listing.erase(KEY, TAG) == Erasure(), "it was published before it was indexed"
        await bench.expect(waiting=1)

    @needs(Capability.UNIQUE, Capability.ORDERING_KEYS)
    async def test_erasure_frees_keys(self, bench: Bench) -> None:
        """An erased task holds neither its unique key, not even for its period, nor its ordering key (laws 4, 7)."""
        await bench.configure(index=("user",))
        unique = UniqueKey(key="k", period=600)
        await bench.publish("u0", unique=unique, tags=(TAG,))
        await bench.publish("e0", ordering_key="e", tags=(TAG,))
        await bench.publish("e1", ordering_key="e")
        erased = await listing_of(bench.backend).erase(KEY, TAG)
        assert erased == Erasure(tasks={State.WAITING: 2})
        (answer,) = await bench.offer(bench.task("u1", unique=unique))
        assert answer.status is Published.ACCEPTED
        taken = await bench.take(bench.subscribe(), 9)
        assert sorted(ids(taken)) == ["e1", "u1"]

    @needs(Capability.STREAMS)
    async def test_erasure_of_events(self, bench: Bench) -> None:
        """The events of an erased task are gone, also for a new task with its id, and no more are stored (law 12)."""
        await bench.configure(index=("user",))
        _, delivery = await bench.running("t0", tags=(TAG,))
        assert await append(bench, delivery, 1)
        assert await listing_of(bench.backend).erase(KEY, TAG) == Erasure(
            tasks={State.IN_FLIGHT: 1}
        )
        assert await streams_of(bench.backend).events(KEY, "t0") is None
        assert not await append(bench, delivery, 2, first=2)
        await bench.publish("t0")
        assert (await page(bench, "t0")).events == ()

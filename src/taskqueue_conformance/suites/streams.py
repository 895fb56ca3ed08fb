"""Events that running tasks stream: kept in order and once, bounded, ended with the task (law 12)."""

from __future__ import annotations

from typing import Any

import pytest

from taskqueue_conformance.bench import KEY, OTHER, Bench
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import needs
from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import EventPage, NewEvent, NewEvents, streams_of
from taskqueue_core.errors import InvalidInput
from taskqueue_core.tasks import Delivery


def new(delivery: Delivery, *values: Any, first: int = 1, channel: str = "data") -> NewEvents:
    """Return events of a delivery, whose values are JSON texts or numbers."""
    texts = (value if isinstance(value, bytes) else str(value).encode() for value in values)
    events = tuple(NewEvent(value=text, channel=channel) for text in texts)
    return NewEvents(delivery=delivery, events=events, first=first)


async def append(bench: Bench, delivery: Delivery, *values: Any, **options: Any) -> bool:
    """Append events to a running task, and return whether its receipt is current."""
    (answer,) = await streams_of(bench.backend).append(new(delivery, *values, **options))
    return answer


async def page(bench: Bench, task_id: str = "t1", **options: Any) -> EventPage:
    """Return a page of events; fail if the task is unknown."""
    found = await streams_of(bench.backend).events(KEY, task_id, **options)
    assert found is not None, "expected the events of a task that the store knows, got None"
    return found


async def short(bench: Bench, task_id: str = "t1", **options: Any) -> list[str]:
    """Return the events of a task in short: id, kind and value."""
    events = (await page(bench, task_id, limit=1000, **options)).events
    return [f"{each.id} {each.kind} {each.value.decode()}" for each in events]


class StreamsSuite(Harness, needs=(Capability.STREAMS,)):
    """Tests of `taskqueue_core.capabilities.Streams`."""

    async def test_events_in_order(self, bench: Bench) -> None:
        """Events are read in the order of their appends, by pages, with channels and times (law 12, U19)."""
        _, delivery = await bench.running("t1")
        assert await page(bench) == EventPage()
        assert await append(bench, delivery, b'{"a": "gr\\u00fc\xc3\x9fe"}', 2)
        assert await append(bench, delivery, "null", first=3, channel="log:x")
        first = await page(bench, limit=2)
        assert [each.value for each in first.events] == [b"1", b'{"a": "gr\\u00fc\xc3\x9fe"}']
        assert [each.channel for each in first.events] == [None, "data"]
        assert (first.next, first.ended) == ("1-2", False)
        rest = await page(bench, after=first.next)
        assert [(each.id, each.value, each.channel) for each in rest.events] == [
            ("1-3", b"2", "data"),
            ("1-4", b"null", "log:x"),
        ]
        assert all(abs(each.at - bench.now) < 60 for each in rest.events)
        assert await page(bench, after=rest.next) == EventPage(next="1-4")

    async def test_many_tasks_in_one_call(self, bench: Bench) -> None:
        """One call appends for several deliveries, and answers for each in order; a stale receipt stores nothing."""
        subscription, one, two = await bench.all_running("t1", "t2")
        await subscription.redeliver(two)
        again = await bench.one(subscription)
        streams = streams_of(bench.backend)
        answers = await streams.append(
            new(two, 7), new(one, 1), new(again, 2), new(one, 3, first=2)
        )
        assert answers == (False, True, True, True)
        assert await short(bench) == ["1-1 attempt 1", "1-2 data 1", "1-3 data 3"]
        assert await short(bench, "t2") == ["1-1 attempt 1", "1-2 data 2"]
        assert await streams.append() == ()

    async def test_repeated_append(self, bench: Bench) -> None:
        """Events that are appended again, because an answer was lost, are stored once (law 12)."""
        _, delivery = await bench.running("t1")
        await append(bench, delivery, 1, 2)
        assert await append(bench, delivery, 1, 2)
        await append(bench, delivery, 2, 3, first=2)
        expected = ["1-1 attempt 1", "1-2 data 1", "1-3 data 2", "1-4 data 3"]
        assert await short(bench) == expected

    async def test_left_out_events(self, bench: Bench) -> None:
        """Numbers that the worker leaves out are reported as trimmed, in the middle of a page too (law 12)."""
        _, delivery = await bench.running("t1")
        await append(bench, delivery, 1)
        await append(bench, delivery, 5, first=5)
        tail = ["1-5 trimmed 3", "1-6 data 5"]
        assert await short(bench) == ["1-1 attempt 1", "1-2 data 1", *tail]
        assert await short(bench, after="1-2") == tail
        assert await short(bench, after="1-4") == ["1-5 trimmed 1", "1-6 data 5"]

    @needs(Capability.CONTROL)
    async def test_trimmed_by_number(self, bench: Bench) -> None:
        """Of more events than ``stream_events``, the newest are kept; a reader learns how many were cut (law 12)."""
        await bench.configure(stream_events=3)
        _, delivery = await bench.running("t1")
        await append(bench, delivery, *range(1, 9))
        tail = ["1-7 data 6", "1-8 data 7", "1-9 data 8"]
        assert await short(bench) == ["1-6 trimmed 6", *tail]
        assert await short(bench, after="1-4") == ["1-6 trimmed 2", *tail]
        assert await short(bench, after="1-6") == tail
        await append(bench, delivery, 9, first=9)
        assert await short(bench, after="1-9") == ["1-10 data 9"]

    @needs(Capability.CONTROL)
    async def test_trimmed_by_size(self, bench: Bench) -> None:
        """Events are cut beyond ``stream_bytes``, and the newest one is kept even if it is larger (law 12)."""
        await bench.configure(stream_bytes=1024)
        _, delivery = await bench.running("t1")
        large = b'"' + b"x" * 400 + b'"'
        await append(bench, delivery, 1, large, large)
        kept = (await page(bench)).events
        assert [len(each.value) for each in kept] == [1, 1, 402, 402]
        await append(bench, delivery, large, first=4)
        assert [each.id for each in (await page(bench)).events] == ["1-3", "1-4", "1-5"]
        await append(bench, delivery, b'"' + b"y" * 3000 + b'"', first=5)
        assert [each.id for each in (await page(bench)).events] == ["1-5", "1-6"]

    @needs(Capability.CONTROL)
    async def test_end_of_a_task(self, bench: Bench) -> None:
        """The last event of a stream has the state in which the task ended; nothing follows it (law 12)."""
        subscription, one, two = await bench.all_running("t1", "t2")
        await append(bench, one, 1)
        await append(bench, two, 1)
        await subscription.ack(one, results=[b"7"])
        await bench.control.cancel(KEY, "t2")
        assert await short(bench) == ["1-1 attempt 1", "1-2 data 1", '1-3 end "done"']
        assert (await short(bench, "t2"))[-1] == '1-3 end "cancelled"'
        assert (await page(bench)).ended
        assert not (await page(bench, limit=2)).ended
        assert await page(bench, after="1-3") == EventPage(next="1-3", ended=True)
        assert not await append(bench, one, 2, first=2)
        assert len(await short(bench)) == 3

    async def test_without_a_stream(self, bench: Bench) -> None:
        """A task that streams nothing has no events, an unknown one has no page, also if others stream."""
        subscription, one, two = await bench.all_running("t1", "t2")
        await append(bench, two, 1)
        streams = streams_of(bench.backend)
        assert await streams.events(KEY, "unknown") is None
        assert await streams.events(OTHER, "t1") is None
        assert await page(bench) == EventPage()
        await subscription.ack(one)
        assert await page(bench, wait=20) == EventPage(ended=True)

    @needs("atomic_retry")
    async def test_further_attempt(self, bench: Bench) -> None:
        """Each delivery that streams begins with an event ``attempt``: after a retry, a release and a loss (law 12)."""
        subscription, delivery = await bench.running("t1")
        await append(bench, delivery, 1)
        await bench.retry(delivery.task, settles=delivery, error="boom")
        stale, delivery = delivery, await bench.one(subscription)
        assert not await append(bench, stale, 9, first=2)
        await append(bench, delivery, 2)
        await subscription.redeliver(delivery)
        await append(bench, await bench.one(subscription), 3)
        assert await short(bench) == [
            "1-1 attempt 1",
            "1-2 data 1",
            "2-3 attempt 2",
            "2-4 data 2",
            "2-5 attempt 2",
            "2-6 data 3",
        ]
        assert await short(bench, after="1-2") == (await short(bench))[2:]

    @needs(Capability.CONTROL)
    async def test_progress_is_an_event(self, bench: Bench) -> None:
        """Progress is an event of a task that streams, and none of a task that does not."""
        _, one, two = await bench.all_running("t1", "t2")
        await append(bench, one, 1)
        await bench.control.progress(one, 0.5)
        await bench.control.progress(one, 'half "way"')
        await bench.control.progress(two, 0.5)
        assert (await short(bench))[2:] == ["1-3 progress 0.5", '1-4 progress "half \\"way\\""']
        assert await short(bench, "t2") == []

    @needs(Capability.DEAD_LETTERS)
    async def test_events_of_a_dead_letter(self, bench: Bench) -> None:
        """A dead letter and its redrive are events ``state``; the stream continues, and ends when it is discarded."""
        subscription, delivery = await bench.running("t1")
        await append(bench, delivery, 1)
        await bench.bury(subscription, delivery)
        assert not (await page(bench)).ended
        await bench.dead_letters.redrive(KEY, "t1")
        delivery = await bench.one(subscription)
        await append(bench, delivery, 2)
        await bench.bury(subscription, delivery)
        await bench.dead_letters.discard(KEY, "t1")
        assert await short(bench) == [
            "1-1 attempt 1",
            "1-2 data 1",
            '1-3 state "dead"',
            '1-4 state "waiting"',
            "1-5 attempt 1",
            "1-6 data 2",
            '1-7 state "dead"',
            '1-8 end "discarded"',
        ]

    @needs(Capability.CONTROL)
    async def test_kept_after_the_end(self, bench: Bench) -> None:
        """The events of an ended task are kept for ``stream_ttl``, longer than its id if asked, and no longer."""
        await bench.configure(stream_ttl=1 + bench.short, dedupe_window=0)
        subscription, delivery = await bench.running("t1")
        await append(bench, delivery, 1)
        await subscription.ack(delivery)
        await bench.control.maintain()
        assert (await short(bench))[-1] == '1-3 end "done"'
        await bench.advance(1 + bench.short)
        await bench.control.maintain()
        found = await streams_of(bench.backend).events(KEY, "t1")
        assert found is None or found == EventPage(ended=True)

    @needs(Capability.CONTROL)
    async def test_id_used_again(self, bench: Bench) -> None:
        """A task that uses the id of an earlier one again begins without its events (law 12)."""
        await bench.configure(dedupe_window=0)
        subscription, delivery = await bench.running("t1")
        await append(bench, delivery, 1)
        await subscription.ack(delivery)
        await bench.publish("t1")
        assert await page(bench) == EventPage()
        delivery = await bench.one(subscription)
        assert await page(bench) == EventPage()
        await append(bench, delivery, 2)
        expected = ["1-1 attempt 1", "1-2 data 2"]
        assert await short(bench) == expected
        assert await short(bench, after="1-3") == expected, "an id of a stream that is gone"
        await subscription.ack(delivery)
        assert await short(bench) == [*expected, '1-3 end "done"']
        await bench.advance(bench.short)
        await bench.publish("t1")
        await subscription.ack(await bench.one(subscription))
        left = await streams_of(bench.backend).events(KEY, "t1")
        assert left in (None, EventPage(ended=True)), "the events of an earlier task were read"

    async def test_waiting_for_events(self, bench: Bench) -> None:
        """A reader that waits gets the next event at once, from any process, and the end (law 12)."""
        subscription, delivery = await bench.running("t1")
        waiting = await bench.start(page(bench, wait=20))
        assert not waiting.done(), "there are no events: expected the call to wait"
        await append(bench, delivery, 1)
        found = await bench.outcome(waiting)
        waiting = await bench.start(page(bench, after=found.next, wait=20))
        await append(bench, delivery, 2, first=2)
        found = await bench.outcome(waiting)
        assert [each.value for each in found.events] == [b"2"]
        waiting = await bench.start(page(bench, after=found.next, wait=20))
        await subscription.ack(delivery)
        assert (await bench.outcome(waiting)).ended
        assert (await page(bench, after="1-4", wait=20)).ended

    async def test_wait_is_bounded(self, bench: Bench) -> None:
        """Without events, the call returns an empty page after ``wait`` seconds."""
        await bench.running("t1")
        waiting = await bench.start(page(bench, wait=bench.short))
        await bench.advance(2 * bench.short)
        assert await bench.outcome(waiting) == EventPage()

    @needs(Capability.CONTROL, "atomic_retry")
    async def test_purged_and_expired(self, bench: Bench) -> None:
        """A task that streamed and waits for its retry ends with an event when it is purged or expires."""
        subscription = await bench.subscribed("t1")
        await bench.publish("t2", deadline=bench.now + 40 * bench.short)
        for delivery in await bench.take(subscription, 2):
            await append(bench, delivery, 1)
            delay = 100 * bench.short if delivery.task.id == "t2" else 0
            await bench.retry(delivery.task, delay, settles=delivery)
        await bench.control.purge(KEY)
        assert (await short(bench))[-1] == '1-3 end "cancelled"'
        assert (await short(bench, "t2"))[-1] == '1-3 end "cancelled"'

    @needs(Capability.CONTROL)
    async def test_deleted_queue(self, bench: Bench) -> None:
        """A deleted queue has no events."""
        subscription, delivery = await bench.running("t1")
        await append(bench, delivery, 1)
        await subscription.ack(delivery)
        await subscription.close()
        await bench.control.delete(KEY)
        assert await streams_of(bench.backend).events(KEY, "t1") is None

    async def test_arguments_of_events(self, bench: Bench) -> None:
        """Invalid arguments are refused with the name of the field."""
        await bench.running("t1")
        wrong: dict[str, tuple[Any, ...]] = {
            "limit": (0, 1001),
            "after": ("", "1", "1-2\n", "1-" + "9" * 99),
            "wait": (-1, 31, float("nan")),
        }
        for field, values in wrong.items():
            for value in values:
                options: dict[str, Any] = {field: value}
                await bench.invalid(field, streams_of(bench.backend).events(KEY, "t1", **options))

    async def test_limits_of_an_event(self, bench: Bench) -> None:
        """An event of 64 KiB is stored; a larger one, another than JSON and a bad channel are refused."""
        _, delivery = await bench.running("t1")
        largest = b'"' + b"x" * (64 * 1024 - 2) + b'"'
        await append(bench, delivery, *([largest] * 3), channel="c" * 50)
        found: list[bytes] = []
        after = None
        while len(found) < 3:
            part = await page(bench, after=after)
            after = part.next
            found += [each.value for each in part.events if each.channel]
        assert found == [largest] * 3
        for field, value, channel in (
            ("value", largest + b" ", "data"),
            ("value", b"{", "data"),
            ("channel", b"1", ""),
            ("channel", b"1", "c" * 51),
            ("channel", b"1", "a b"),
        ):
            with pytest.raises(InvalidInput) as error:
                NewEvent(value=value, channel=channel)
            assert error.value.field == field

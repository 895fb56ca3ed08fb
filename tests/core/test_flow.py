"""The arithmetic of queue limits, which all backends share: token buckets, concurrency, capacity and refusals."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from taskqueue_core.authoring.entries import Entry
from taskqueue_core.authoring.helpers import UNLIMITED, QueueRoom, refusal, room_of
from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.errors import InvalidInput
from taskqueue_core.queue_settings import read_settings
from taskqueue_core.rate_limit import (
    Bucket,
    IntervalUnit,
    RateLimit,
    bucket_after,
    capacity_for,
    intake_for,
)
from taskqueue_core.tasks import Refusal, State, Task

NOW = 1_800_000_000.0
TASK = Task(key="k", id="t")
TEN = RateLimit(max_tokens=10, interval=20)


@pytest.mark.parametrize(
    ("unit", "seconds"),
    [(IntervalUnit.SECONDS, 1), (IntervalUnit.MINUTES, 60), (IntervalUnit.HOURS, 3600)],
)
def test_units(unit: IntervalUnit, seconds: int) -> None:
    """F3: the interval of a rate limit is given in seconds, minutes or hours; the unit may be given as text."""
    limit = RateLimit.model_validate({"max_tokens": 1, "interval": 7, "interval_unit": unit.value})
    assert limit.period == 7 * seconds


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"max_tokens": 0},
        {"max_tokens": 1, "interval": 0},
        {"max_tokens": 1, "interval_unit": "DAYS"},
        {"max_tokens": 1, "burst": 2},
    ],
)
def test_wrong_limits(wrong: dict[str, object]) -> None:
    """F3: a rate limit with a zero, an unknown unit or an unknown field is rejected."""
    with pytest.raises(ValidationError):
        RateLimit.model_validate(wrong)


def test_bucket() -> None:
    """F3: a bucket refills evenly, never beyond its size, and reports when the next token is available."""
    bucket = Bucket(tokens=10.0, at=NOW)
    bucket.tokens -= 10
    assert [bucket.fill(TEN, NOW + second) for second in (0, 1, 2, 3, 4)] == [0, 0, 1, 1, 2]
    assert bucket.fill(TEN, NOW + 9999) == 10
    bucket.tokens -= 10
    assert bucket.next_at(TEN) == NOW + 10_001


def test_a_clock_that_goes_back() -> None:
    """Law 5: if the clock goes back and returns, a bucket gives no second set of tokens for the same period."""
    bucket = Bucket(tokens=0.0, at=NOW)
    assert bucket.fill(TEN, NOW + 4) == 2
    bucket.tokens -= 2
    assert bucket.fill(TEN, NOW) == 0
    assert bucket.fill(TEN, NOW + 4) == 0


@given(
    st.builds(RateLimit, max_tokens=st.integers(1, 1000), interval=st.integers(1, 3600)),
    st.lists(st.tuples(st.floats(0, 60), st.integers(0, 50)), max_size=60),
)
def test_any_window(limit: RateLimit, steps: list[tuple[float, int]]) -> None:
    """Law 5: in any window, a bucket gives at most its size plus the tokens that accrued during the window."""
    bucket, now, given_at = Bucket(tokens=float(limit.max_tokens), at=NOW), NOW, list[float]()
    for wait, wished in steps:
        now += wait
        taken = min(wished, bucket.fill(limit, now))
        bucket.tokens -= taken
        given_at += [now] * taken
    rate = limit.max_tokens / limit.period
    for first, start in enumerate(given_at):
        for count, end in enumerate(given_at[first:], 1):
            assert count <= limit.max_tokens + (end - start) * rate + 1e-3


@given(
    st.builds(RateLimit, max_tokens=st.integers(1, 20), interval=st.integers(1, 3600)),
    st.floats(0, 0.999),
)
def test_who_wakes_for_a_token_finds_it(limit: RateLimit, tokens: float) -> None:
    """F3: at the time reported by ``next_at`` exactly one token is available, despite floating-point rounding."""
    bucket = Bucket(tokens=tokens, at=NOW)
    assert bucket.fill(limit, NOW) == 0
    assert bucket.fill(limit, bucket.next_at(limit)) == 1


def test_changed_limits() -> None:
    """Law 9: a changed rate limit keeps the saved tokens, up to the new size.

    A new rate limit starts with a full bucket.
    """
    bucket = bucket_after(None, None, TEN, NOW)
    assert bucket == Bucket(tokens=10.0, at=NOW)
    bucket.tokens -= 10
    small = RateLimit(max_tokens=3)
    changed = bucket_after(bucket, TEN, small, NOW + 10)
    assert changed is not None
    assert changed.fill(small, NOW + 10) == 3, "5 were saved, 3 have room"
    assert bucket_after(changed, small, None, NOW) is None


def test_room() -> None:
    """F4, F6: the tighter of two limits applies; a time is given only if waiting alone makes room available."""
    empty, full = Bucket(tokens=0.0, at=NOW), Bucket(tokens=10.0, at=NOW)
    both = QueueSettings(max_inflight=4, rate_limit=TEN)
    assert room_of(QueueSettings(), None, 99, NOW) == UNLIMITED
    assert room_of(QueueSettings(paused=True), full, 0, NOW) == QueueRoom(0)
    assert room_of(both, full, 1, NOW) == QueueRoom(3)
    assert room_of(both, empty, 1, NOW) == QueueRoom(0, NOW + 2)
    assert room_of(both, empty, 4, NOW) == QueueRoom(0)
    assert room_of(both, full, 9, NOW) == QueueRoom(0), "it was lowered"
    assert room_of(QueueSettings(rate_limit=TEN), full, 99, NOW) == QueueRoom(10)


def test_refusals() -> None:
    """B13: a refusal gives its reason as text and as a code; if the queue is full, it says when to retry."""
    bounded = QueueSettings(capacity=100)
    assert refusal(TASK, bounded, 99) is None
    full = refusal(TASK, bounded, 100)
    assert full is not None
    assert full.reason == "tasks waiting for their first delivery: 100; capacity: 100"
    assert (full.code, full.depth, full.retry_after) == (Refusal.QUEUE_FULL, 100, 1.0)
    paused = refusal(TASK, QueueSettings(capacity=1, intake_paused=True), 5)
    assert paused is not None
    assert (paused.code, paused.reason) == (Refusal.INTAKE_PAUSED, "the intake is paused")
    assert (paused.key, paused.task_id, paused.depth) == ("k", "t", None)
    moved = refusal(TASK, QueueSettings(moved_to="k-2"), 0)
    assert moved is not None
    assert (moved.code, moved.reason) == (Refusal.MOVED, "the queue has moved to 'k-2'")


def test_what_counts() -> None:
    """Law 6: a task counts against the capacity until its first delivery, its end or its first retry.

    After that it never counts again.
    """
    entry = Entry(task=TASK)
    for state, change in (
        (State.SCHEDULED, 1),
        (State.WAITING, 0),
        (State.IN_FLIGHT, -1),
        (State.WAITING, 0),
        (State.CANCELLED, 0),
    ):
        if state is State.IN_FLIGHT:
            entry.hand_out("r", NOW)
        entry.state = state
        assert entry.recount() == change
    unknown = Entry(task=TASK)
    unknown.retry("token", None, NOW)
    unknown.state = State.SCHEDULED
    assert unknown.recount() == 0
    retried = Entry(task=TASK, state=State.WAITING)
    assert retried.recount() == 1
    retried.retry("token", None, NOW)
    retried.state = State.SCHEDULED
    assert retried.recount() == -1


@pytest.mark.parametrize(
    ("concurrency", "factors", "capacity"),
    [
        ([4, 2], (10, 0), 60),
        ([4, 2], (0, 3), 18),
        ([4, 2], (10, 3), 60),
        ([4], (5,), 20),
        ([300, 300], (2,), 1000),
        ([1] * 1000, (1,), 1000),
        ([1000], (1, 0), 1000),
        ([10**30], (10**30,), 1000),
        ([], (10, 3), 0),
        ([0, 0], (10, 3), 0),
        ([4, 2], (0, 0), 0),
        ([4, 2], (), 0),
    ],
)
def test_capacity_follows_the_endpoints(
    concurrency: list[int], factors: tuple[int, ...], capacity: int
) -> None:
    """B4: the capacity is the larger factor times the total concurrency of the endpoints, and at most 1000."""
    assert capacity_for(concurrency, *factors) == capacity
    assert capacity_for(iter(concurrency), *factors) == capacity


@pytest.mark.parametrize("wrong", [-1, 1.5, True, None, "3"])
def test_capacity_of_nonsense(wrong: Any) -> None:
    """B4: an invalid number raises an error that names the argument."""
    for field, call in (
        ("concurrency", lambda: capacity_for([1, wrong], 1)),
        ("factor", lambda: capacity_for([1], 1, wrong)),
        ("capacity", lambda: intake_for(wrong)),
    ):
        with pytest.raises(InvalidInput) as caught:
            call()
        assert caught.value.field == field


def test_no_capacity_pauses_the_intake() -> None:
    """B4: a capacity of 0 pauses the intake, so publishes are refused; the first endpoint opens the intake again."""
    for capacity, kept, paused in ((0, 1, True), (1, 1, False), (1000, 1000, False)):
        settings = QueueSettings.model_validate(intake_for(capacity))
        assert (settings.capacity, settings.intake_paused) == (kept, paused)
    nothing = refusal(TASK, QueueSettings.model_validate(intake_for(0)), 0)
    assert nothing is not None
    assert nothing.code is Refusal.INTAKE_PAUSED
    assert refusal(TASK, QueueSettings.model_validate(intake_for(1)), 0) is None


def test_a_whole_number_may_be_written_with_a_point() -> None:
    """U2: 1.0 and 1 are the same JSON number, so both are allowed for a setting that is a whole number; 1.5 is not."""
    settings = read_settings(
        b'{"rate_limit": {"max_tokens": 5.0, "interval": 1.0}, "capacity": 9.0}'
    )
    assert settings == read_settings(
        b'{"rate_limit": {"max_tokens": 5, "interval": 1}, "capacity": 9}'
    )
    assert type(settings.capacity) is int
    with pytest.raises(InvalidInput, match="interval"):
        read_settings(b'{"rate_limit": {"max_tokens": 5, "interval": 1.5}}')

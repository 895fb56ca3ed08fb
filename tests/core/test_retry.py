"""The retry policy: the delay before each retry, the maximum number of attempts, and the verb for each outcome."""

import random
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS
from taskqueue_core.retry import (
    EXHAUSTED,
    Ack,
    Bury,
    Failed,
    HandBack,
    Outcome,
    Redeliver,
    Rejected,
    RetryLater,
    RetryPolicy,
    ScheduleRetry,
    Snoozed,
    Success,
    decide,
)
from taskqueue_core.tasks import Delivery, Task

DEFAULT = RetryPolicy()
unit = st.floats(0, 1, exclude_max=True)


def middle() -> float:
    """Return 0.5, the random value with which a delay has no jitter."""
    return 0.5


def delivery(attempt: int = 1, **fields: Any) -> Delivery:
    """Return a delivery of a task with this attempt number."""
    task = Task(key="k", max_attempts=fields.pop("max_attempts", None))
    return Delivery(task=task, receipt="r", attempt=attempt, delivered_at=0.0, **fields)


def test_default_delays() -> None:
    """C15: without jitter, retries wait 1, 2, 4, 8 and 16 seconds, and from then on 30 seconds."""
    waits = [DEFAULT.delay(attempt, middle) for attempt in range(1, 9)]
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30]


@given(attempt=st.integers(1, 10**9), source=unit)
def test_jitter_stays_within_ten_percent(attempt: int, source: float) -> None:
    """C15: for any attempt and any random value, the delay differs from the exact one by at most 10 %."""
    exact = min(2.0 ** min(attempt - 1, 10), 30.0)
    wait = DEFAULT.delay(attempt, lambda: source)
    assert exact * 0.9 - 1e-9 <= wait <= exact * 1.1 + 1e-9


@given(
    base=st.floats(0, 86_400),
    cap=st.floats(0, 7 * 86_400),
    jitter=st.floats(0, 1),
    factor=st.floats(1, 100),
    attempt=st.integers(1, 10_000),
    source=unit,
)
def test_any_policy_gives_a_usable_delay(
    base: float, cap: float, jitter: float, factor: float, attempt: int, source: float
) -> None:
    """No valid policy gives an overflow, a negative delay, or a delay above its cap plus jitter."""
    policy = RetryPolicy(base=base, cap=cap, jitter=jitter, factor=factor)
    wait = policy.delay(attempt, lambda: source)
    assert 0 <= wait <= cap * (1 + jitter) + 1e-6


@given(base=st.floats(0.001, 100), attempts=st.integers(2, 300))
def test_waits_never_shrink(base: float, attempts: int) -> None:
    """Without jitter, the delay of a later attempt is never shorter than that of an earlier one."""
    policy = RetryPolicy(base=base, jitter=0)
    waits = [policy.delay(attempt) for attempt in range(1, attempts)]
    assert all(earlier <= later for earlier, later in pairwise(waits))


@pytest.mark.parametrize(
    ("policy", "waits"),
    [
        (RetryPolicy(base=1, factor=3, cap=20, jitter=0), [1, 3, 9, 20, 20]),
        (RetryPolicy(base=5, factor=1, jitter=0), [5, 5, 5, 5, 5]),
        (RetryPolicy(base=1, factor=1.5, cap=600, jitter=0), [1, 1.5, 2.25, 3.375, 5.0625]),
        (RetryPolicy(delays=(7, 0, 900), jitter=0), [7, 0, 900, 900, 900]),
    ],
)
def test_factor_and_delays(policy: RetryPolicy, waits: list[float]) -> None:
    """U3: the factor multiplies the delay after each retry; a list of delays replaces it, and its last one repeats."""
    assert [policy.delay(attempt) for attempt in range(1, 6)] == waits


@pytest.mark.parametrize("attempt", [1, 2, 64, 65, 66, 1000])
def test_base_of_zero_always_retries_at_once(attempt: int) -> None:
    """With a base of 0, all attempts are retried at once."""
    assert RetryPolicy(base=0).delay(attempt) == 0


def test_failing_together_does_not_mean_retrying_together() -> None:
    """Fault F8: when 10 000 tasks fail at the same time, their retries are spread over several seconds.

    No second has more than three times the mean number of retries.
    """
    source = random.Random(8)
    seconds = Counter(int(DEFAULT.delay(6, source.random)) for _ in range(10_000))
    span = range(27, 33)
    assert set(seconds) <= set(span)
    assert max(seconds.values()) <= 3 * 10_000 / len(span)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("base", -1),
        ("base", float("nan")),
        ("cap", float("inf")),
        ("jitter", 1.1),
        ("factor", 0.9),
        ("factor", 101),
        ("delays", [-1]),
        ("delays", [1] * 101),
        ("max_attempts", 0),
        ("max_attempts", 1001),
        ("unknown", 1),
    ],
)
def test_invalid_policy(field: str, value: float) -> None:
    """An invalid retry policy raises a validation error that names the field (fault K4)."""
    with pytest.raises(ValidationError, match=field):
        RetryPolicy.model_validate({field: value})


@pytest.mark.parametrize(
    ("outcome", "verb"),
    [
        (Success(b"1"), Ack(b"1")),
        (Success(), Ack(None)),
        (HandBack(), Redeliver(lost=False)),
        (HandBack(lost=True), Redeliver(lost=True)),
        (Rejected("bad input"), Bury("bad input", None)),
        (Rejected("bad input", "at byte 3"), Bury("bad input", "at byte 3")),
        (Failed("boom"), ScheduleRetry(1.0, "boom")),
        (RetryLater(), ScheduleRetry(1.0, "retry requested")),
        (RetryLater(7.5, "busy"), ScheduleRetry(7.5, "busy")),
        (RetryLater(0), ScheduleRetry(0, "retry requested")),
        (Snoozed(7.5), ScheduleRetry(7.5, None, free=True)),
    ],
)
def test_each_outcome_has_one_verb(outcome: Outcome, verb: object) -> None:
    """REV-E1: success, release, retry and rejection of a task each lead to a different verb."""
    assert decide(outcome, delivery(), DEFAULT, middle) == verb


@pytest.mark.parametrize("outcome", [Failed("boom"), RetryLater(3.0, "boom")])
def test_fifty_attempts_by_default(outcome: Outcome) -> None:
    """C16: by default, the 49th failed attempt is retried, and the 50th moves the task to the dead letters."""
    assert isinstance(decide(outcome, delivery(49), DEFAULT), ScheduleRetry)
    assert decide(outcome, delivery(50), DEFAULT) == Bury("max_retries_exceeded", "boom")
    assert EXHAUSTED == "max_retries_exceeded"


@pytest.mark.parametrize(
    ("policy", "task", "last"),
    [(50, None, 50), (3, None, 3), (3, 7, 7), (7, 3, 3), (7, 1, 1), (1, None, 1)],
)
def test_limit_of_queue_and_task(policy: int, task: int | None, last: int) -> None:
    """C16: a task's own ``max_attempts`` takes precedence over the one of the policy."""
    fields = {} if task is None else {"max_attempts": task}
    allowed = RetryPolicy(max_attempts=policy)
    for attempt in range(1, last):
        assert isinstance(decide(Failed("x"), delivery(attempt, **fields), allowed), ScheduleRetry)
    assert isinstance(decide(Failed("x"), delivery(last, **fields), allowed), Bury)


def test_redriven_tasks_start_counting_again() -> None:
    """C17: attempts before a redrive count neither towards the limit nor towards the delay."""
    first_after = delivery(51, prior=50)
    assert decide(Failed("x"), first_after, DEFAULT, middle) == ScheduleRetry(1.0, "x")
    assert isinstance(decide(Failed("x"), delivery(99, prior=50), DEFAULT), ScheduleRetry)
    assert isinstance(decide(Failed("x"), delivery(100, prior=50), DEFAULT), Bury)


def test_a_snooze_costs_no_attempt() -> None:
    """A snooze never uses up the attempts, and comes neither before nor after their delays (U5)."""
    last = delivery(3, prior=2, max_attempts=1)
    assert isinstance(decide(Snoozed(1), last, DEFAULT), ScheduleRetry)
    assert decide(Failed("x"), last, DEFAULT) == Bury(EXHAUSTED, "x")
    many = delivery(1000, prior=999)
    assert decide(Failed("x"), many, DEFAULT, middle) == ScheduleRetry(1.0, "x")


@pytest.mark.parametrize("outcome", [Snoozed(1), Failed("x"), RetryLater(1)])
def test_attempts_have_an_end(outcome: Outcome) -> None:
    """Attempts and snoozes together are bounded, because the store counts attempts in 16 bits (U5)."""
    before = LIMITS.attempts - 1
    assert isinstance(decide(outcome, delivery(before, prior=before - 1), DEFAULT), ScheduleRetry)
    verb = decide(outcome, delivery(LIMITS.attempts, prior=before), DEFAULT)
    assert isinstance(verb, Bury)
    assert verb.reason == EXHAUSTED


@given(attempt=st.integers(1, 2000), losses=st.integers(0, 50), lost=st.booleans())
def test_a_release_never_counts(attempt: int, losses: int, lost: bool) -> None:  # noqa: FBT001
    """FIX-C3 and law 3: releasing a delivery, however often, is neither a failed attempt nor the end of a task."""
    assert decide(HandBack(lost), delivery(attempt, losses=losses), DEFAULT) == Redeliver(lost)


def test_losses_are_not_attempts() -> None:
    """Law 3: losses do not count as attempts."""
    assert isinstance(decide(Failed("x"), delivery(1, losses=49), DEFAULT), ScheduleRetry)


@pytest.mark.parametrize("delay", [-1, float("nan"), float("inf"), 1e300, True, "5"])
def test_a_handler_asks_for_a_sane_delay(delay: float) -> None:
    """Fault K4: a handler that requests an invalid delay gets an error that names the argument."""
    with pytest.raises(InvalidInput, match=r"^delay: "):
        RetryLater(delay)

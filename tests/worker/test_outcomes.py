"""Outcomes of handlers from return values and exceptions, and the context that handlers get."""

from __future__ import annotations

import msgspec
import pytest
from pydantic import BaseModel

from taskqueue_core.application.results import Results
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS
from taskqueue_core.retry import Failed, Outcome, Rejected, RetryLater, Snoozed, Success
from taskqueue_worker import Context, Reject, Retry, Snooze
from taskqueue_worker.outcomes import outcome_of_error, outcome_of_value
from tests.worker.fake import work


class Model(BaseModel):
    """A result that pydantic can serialise."""

    n: int = 1


class Rude(Exception):
    """An exception whose text cannot be read."""

    def __str__(self) -> str:
        """Raise an error."""
        raise OSError


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, Success()),
        (0, Success(b"0")),
        ({"a": [1, "é"]}, Success('{"a":[1,"é"]}'.encode())),
        ([Model()], Success(b'[{"n":1}]')),
        (Retry(), RetryLater()),
        (Retry(3), RetryLater(3, "retry requested")),
        (Reject("no"), Rejected("no")),
        (Snooze(3), Snoozed(3)),
        (
            "\ud800",
            Rejected(
                "invalid_result",
                "result: got str of length 1; allowed: "
                "a value that JSON can express (no NaN, no bytes, no cycles; keys must be text)",
            ),
        ),
        (
            "x" * 9,
            Rejected("invalid_result", "the handler returned 11 bytes of JSON; the limit is 10"),
        ),
    ],
)
def test_values(value: object, expected: Outcome) -> None:
    """REV-E1: each value that a handler may return becomes exactly one outcome."""
    limit = 10 if value == "x" * 9 else LIMITS.result
    assert outcome_of_value(value, limit, Results(lambda: None, batch=False)) == expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("wrong"), Failed("ValueError: wrong")),
        (ValueError(), Failed("ValueError")),
        (Rude(), Failed("Rude")),
        (ValueError("\ud800"), Failed("ValueError: ?")),
        (ValueError("x" * 10_000), Failed(("ValueError: " + "x" * 10_000)[: LIMITS.text])),
        (Retry(1.5, "later"), RetryLater(1.5, "later")),
        (Reject("r" * 10_000, "why"), Rejected("r" * LIMITS.text, "why")),
    ],
    ids=lambda case: type(case).__name__,
)
def test_errors(error: Exception, expected: Outcome) -> None:
    """Fault A11: an exception becomes an outcome, and its text is cut so that it fits into a frame."""
    assert outcome_of_error(error) == expected


def failing(number: int) -> None:
    """Raise an error with a cause, from a function whose name shows in the traceback."""
    try:
        {0: 0}[number]
    except KeyError as error:
        raise ValueError("wrong") from error


def test_tracebacks_have_causes() -> None:
    """An exception becomes an outcome with its traceback and its causes; one that was not raised has none (U10)."""
    with pytest.raises(ValueError, match="wrong") as caught:
        failing(7)
    outcome = outcome_of_error(caught.value)
    assert isinstance(outcome, Failed)
    lines = (outcome.traceback or "").splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "KeyError: 7" in lines
    assert "The above exception was the direct cause of the following exception:" in lines
    assert lines[-1] == "ValueError: wrong"
    with pytest.raises(Reject) as rejected:
        raise Reject("no") from caught.value
    outcome = outcome_of_error(rejected.value)
    assert isinstance(outcome, Rejected)
    assert "ValueError: wrong" in (outcome.traceback or "")
    assert outcome_of_error(ValueError("x" * 9)) == Failed("ValueError: " + "x" * 9)


def test_a_long_traceback_keeps_its_end() -> None:
    """The end of a traceback says what happened, so its beginning is cut (U10)."""
    with pytest.raises(ValueError, match="end") as caught:
        raise ValueError("é" * LIMITS.traceback + "end")
    outcome = outcome_of_error(caught.value)
    assert isinstance(outcome, Failed)
    assert outcome.traceback is not None
    assert outcome.traceback.endswith("end\n")
    assert len(outcome.traceback.encode()) <= LIMITS.traceback


@pytest.mark.parametrize("kind", [Retry, Snooze])
@pytest.mark.parametrize("delay", [-1, float("nan"), float("inf"), 366 * 86_400, True])
def test_a_retry_has_a_sane_delay(kind: type[Retry | Snooze], delay: float) -> None:
    """C15, fault K4: an invalid delay is refused when the retry is created, and not later by the server."""
    with pytest.raises(InvalidInput, match="delay"):
        kind(delay)


def test_failures_are_the_attempts_that_count() -> None:
    """Neither snoozes nor attempts before a redrive count as failures of the task (U5)."""
    delivery = msgspec.structs.replace(work(), attempt=5, prior=3)
    assert Context(delivery, print).failures == 1
    assert Context(work(), print).failures == 0


def test_the_context_has_facts_and_reports_progress() -> None:
    """The context has the data of the delivery, and accepts progress as a number from 0 to 1 or a short text."""
    reports: list[tuple[str, float | str]] = []
    delivery = work(receipt="r1", attempt=4)
    context = Context(delivery, lambda receipt, value: reports.append((receipt, value)))
    assert (context.key, context.task_id, context.attempt, context.losses) == (
        "work",
        delivery.task.id,
        4,
        0,
    )
    assert context.headers == {}
    assert context.deadline is None
    for value in (0, 0.5, 1, "\ud800" + "x" * 9999):
        context.progress(value)
    assert reports == [("r1", 0.0), ("r1", 0.5), ("r1", 1.0), ("r1", "?" + "x" * (LIMITS.text - 1))]
    for bad in (-0.1, 1.1, float("nan"), True, None, b"x"):
        with pytest.raises(InvalidInput, match="progress"):
            context.progress(bad)  # type: ignore[arg-type]
    assert not context.revoked
    context.revoke()
    assert context.revoked


def test_a_requested_retry_has_the_traceback_of_its_reason() -> None:
    """U10: a retry that a handler asks for has the traceback of the exception that it caught, and none of its own."""

    def retry(*, after: bool) -> None:
        try:
            failing(1)
        except ValueError as error:
            if after:
                raise Retry from error
        raise Retry

    for after in (True, False):
        with pytest.raises(Retry) as caught:
            retry(after=after)
        outcome = outcome_of_error(caught.value)
        assert isinstance(outcome, RetryLater)
        assert (outcome.traceback is not None) is after

"""Tests of the circuit breaker for endpoints, with a manual clock."""

from __future__ import annotations

import random

import pytest

from taskqueue_dispatch.config import DispatchSettings
from taskqueue_dispatch.endpoint_client import breaker as module
from taskqueue_dispatch.endpoint_client.breaker import LONGEST, Breaker

FLUX = ("flux", "one")


class Now:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        """Return the current time in seconds."""
        return self.time


@pytest.fixture
def now() -> Now:
    """Return a manual clock."""
    return Now()


@pytest.fixture
def breaker(now: Now) -> Breaker:
    """Return a breaker that opens after three failures in a row, first for 10 seconds."""
    settings = DispatchSettings(_env_file=None, breaker_failures=3, breaker_rest=10.0)
    return Breaker(settings, now)


def opened(breaker: Breaker) -> None:
    """Report three failures of the endpoint, so that its circuit opens."""
    assert [breaker.failed(*FLUX) for _ in range(3)] == [None, None, 10.0]


def test_closed(breaker: Breaker) -> None:
    """Failures that are not consecutive do not open the circuit (fault H5)."""
    for _ in range(10):
        assert breaker.allows(*FLUX)
        assert breaker.failed(*FLUX) is None
        assert breaker.failed(*FLUX) is None
        breaker.passed(*FLUX)


def test_it_opens(breaker: Breaker) -> None:
    """Three consecutive failures open the circuit, for this model on this endpoint only (fault H5)."""
    opened(breaker)
    assert not breaker.allows(*FLUX)
    assert breaker.allows("flux", "two")
    assert breaker.allows("zimg", "one")
    assert breaker.failed("zimg", "one") is None


def test_what_was_under_way(breaker: Breaker, now: Now) -> None:
    """While the circuit is open, outcomes of jobs sent earlier neither lengthen nor shorten the pause (fault H5)."""
    opened(breaker)
    assert [breaker.failed(*FLUX) for _ in range(50)] == [None] * 50
    breaker.passed(*FLUX)
    assert not breaker.allows(*FLUX)
    now.time += 10
    assert breaker.allows(*FLUX)
    assert breaker.failed(*FLUX) == 20.0


def test_half_open(breaker: Breaker, now: Now) -> None:
    """After the pause one trial job is allowed at a time, and its success closes the circuit (fault H5)."""
    opened(breaker)
    now.time += 9.9
    assert not breaker.allows(*FLUX)
    now.time += 0.1
    assert [breaker.allows(*FLUX) for _ in range(5)] == [True] + [False] * 4
    breaker.passed(*FLUX)
    assert all(breaker.allows(*FLUX) for _ in range(5))
    opened(breaker)


def test_a_failed_trial(breaker: Breaker, now: Now) -> None:
    """Each failed trial doubles the pause, up to five minutes (fault H5)."""
    opened(breaker)
    rest, rests = 10.0, []
    for _ in range(8):
        now.time += rest
        assert breaker.allows(*FLUX)
        found = breaker.failed(*FLUX)
        assert found is not None
        rests.append(rest := found)
    assert rests == [20, 40, 80, 160, LONGEST, LONGEST, LONGEST, LONGEST]


def test_a_failure_without_a_trial(breaker: Breaker, now: Now) -> None:
    """A failure after the pause opens the circuit again, even if no trial was requested (fault H5)."""
    opened(breaker)
    now.time += 10
    assert breaker.failed(*FLUX) == 20.0


def test_a_trial_without_an_outcome(breaker: Breaker, now: Now) -> None:
    """If a trial has no outcome, another job may be the trial, after a minute at the latest (fault H5)."""
    opened(breaker)
    now.time += 10
    assert breaker.allows(*FLUX)
    breaker.undecided(*FLUX)
    assert breaker.allows(*FLUX)
    now.time += 59.9
    assert not breaker.allows(*FLUX)
    now.time += 0.1
    assert breaker.allows(*FLUX)


def test_nothing_is_kept_of_endpoints_that_are_gone(
    breaker: Breaker, now: Now, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The breaker keeps a bounded number of circuits, and discards open ones last (fault H5)."""
    monkeypatch.setattr(module, "_MAX_CIRCUITS", 10)
    for number in range(100):
        breaker.failed("m", str(number))
        now.time += 1
        assert len(breaker._circuits) <= 10
    opened(breaker)
    for number in range(9):
        breaker.failed("n", str(number))
    assert not breaker.allows(*FLUX)
    now.time += 3 * LONGEST
    breaker.failed("n", "new")
    assert len(breaker._circuits) == 1


def test_any_order(now: Now) -> None:
    """After any sequence of events only one trial runs at a time, and no pause exceeds the maximum (fault H5)."""
    chosen = random.Random(7)
    breaker = Breaker(DispatchSettings(_env_file=None, breaker_failures=2, breaker_rest=1.0), now)
    until, trial = 0.0, 0.0
    for _ in range(20_000):
        now.time += chosen.choice((0.0, 0.3, 5.0, 70.0))
        match chosen.randrange(4):
            case 0:
                if breaker.allows(*FLUX) and FLUX in breaker._circuits and until:
                    assert now.time >= max(until, trial)
                    trial = now.time + 60
            case 1:
                rest = breaker.failed(*FLUX)
                if rest is not None:
                    assert 1.0 <= rest <= LONGEST
                    until, trial = now.time + rest, 0.0
            case 2:
                breaker.passed(*FLUX)
                if now.time >= until:
                    until = trial = 0.0
            case _:
                breaker.undecided(*FLUX)
                trial = 0.0
    now.time += LONGEST + 60
    assert breaker.allows(*FLUX)

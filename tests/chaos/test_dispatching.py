"""Two dispatchers with a poisonous tenant, GPU servers that misbehave, and callback hosts that hang."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.cases import CHAOS, LONG
from tests.chaos.checker import check
from tests.chaos.history import Event, What
from tests.chaos.rules_jobs import p99
from tests.chaos.seeded import carry_out, scenario
from tests.chaos.story import Dump
from tests.chaos.verdicts import broken

_SEEDS = [1, *(pytest.param(seed, marks=CHAOS) for seed in range(2, 8))]


@LONG
@pytest.mark.parametrize("seed", _SEEDS)
def test_dispatchers(seed: int) -> None:
    """No fault makes a job run twice at once, exceed the slots, or get lost (U26, laws 1 and 6, faults A1, B1, H1, H2).

    One tenant's jobs fail, exceed their time or have callback hosts that hang.
    """
    report = carry_out(scenario(20_000 + seed, "dispatch"))
    assert report.ok, str(report)
    jobs = report.figures.jobs
    assert jobs.runs >= report.figures.tasks > 100
    assert jobs.callbacks > 100


class Journal:
    """Events of a handmade run of the dispatcher."""

    def __init__(self) -> None:
        """Begin with one endpoint of two slots."""
        self.events: list[Event] = []
        self.at = 0.0
        self.note(What.SETTINGS, "world", key="one", name="slots", value=2)

    def note(self, what: What, by: str, **fields: Any) -> None:
        """Append an event, one second after the one before."""
        self.at += 1.0
        self.events.append(Event(at=self.at, by=by, what=what, **fields))

    def run(self, job: str, *, call: int, by: str = "gpu-1", name: str = "one") -> None:
        """Append the beginning of a run."""
        self.note(What.RUN, by, key="q", task=job, call=call, name=name)

    def ran(self, job: str, *, call: int, by: str = "gpu-1", outcome: str = "success") -> None:
        """Append the end of a run."""
        self.note(What.RAN, by, key="q", task=job, call=call, outcome=outcome)

    def broken(self) -> set[str]:
        """Return the rules that the run breaks."""
        return broken(check(self.events, Dump()))


def test_runs_one_after_the_other() -> None:
    """A job may run again after its run has ended, and after its server was killed."""
    journal = Journal()
    journal.run("a", call=1)
    journal.run("b", call=2)
    journal.ran("a", call=1, outcome="failed")
    journal.run("a", call=3)
    journal.note(What.KILLED, "world", target="gpu-1", name="gpu")
    journal.run("a", call=1, by="gpu-2")
    journal.run("b", call=2, by="gpu-2")
    assert journal.broken() == set()


def test_runs_at_the_same_time() -> None:
    """Rule once: a job that runs on two servers at the same time is found (law 6)."""
    journal = Journal()
    journal.note(What.SETTINGS, "world", key="two", name="slots", value=2)
    journal.run("a", call=1)
    journal.run("a", call=1, by="gpu-2", name="two")
    assert journal.broken() == {"once"}


def test_more_runs_than_slots() -> None:
    """Rule slots: an endpoint with more jobs than slots is found (C18)."""
    journal = Journal()
    for number in (1, 2, 3):
        journal.run(f"job-{number}", call=number)
    assert journal.broken() == {"slots"}


@pytest.mark.parametrize(
    ("outcome", "note", "good"),
    [
        ("done", "a", True),
        ("done", "b", False),
        ("dead", "max_retries_exceeded", True),
        ("dead", "", False),
        ("in_flight", "", False),
    ],
)
def test_ends_of_jobs(outcome: str, note: str, good: bool) -> None:  # noqa: FBT001 - a parameter of pytest
    """Rule ends: a job ends with its own result or with a stated failure."""
    journal = Journal()
    journal.run("a", call=1)
    journal.ran("a", call=1)
    journal.note(What.ENDING, "world", key="q", task="a", outcome=outcome, note=note)
    assert journal.broken() == (set() if good else {"ends"})


def test_done_without_a_run() -> None:
    """Rule ends: a job that is done although no server has computed its result is found."""
    journal = Journal()
    journal.run("a", call=1)
    journal.ran("a", call=1, outcome="failed")
    journal.note(What.ENDING, "world", key="q", task="a", outcome="done", note="a")
    assert journal.broken() == {"ends"}


def test_the_percentile() -> None:
    """The 99th percentile is a measured value, and 0 without values."""
    assert p99(()) == 0.0
    assert p99(range(1, 101)) == 99
    assert p99([0.5]) == 0.5

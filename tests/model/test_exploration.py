"""All laws hold in every state of the small models, and the exploration finds each known mistake."""

from __future__ import annotations

import pytest

from tests.model.broken import MISTAKES, Hasty
from tests.model.broken_firing import FIRING_MISTAKES
from tests.model.explore import Explored, explore
from tests.model.firing import Firing
from tests.model.plans import FIRING, SMALL
from tests.model.players import Plan, Todo
from tests.model.schedules import Schedules
from tests.model.small import Small
from tests.model.spec import Spec

REPLICATED = Plan((Todo("a", "a1", ("ack",)),), faults=1, replicated=True)


QUICK = (
    "every verb, and a task of a higher priority",
    "one in flight at most",
    "a replica confirms, and workers leave",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in SMALL]
)
def test_every_law_holds_in_every_state(name: str) -> None:
    """R0 to R10, R13, R14, fault M2: no sequence of steps and faults within the model's bounds breaks a law."""
    found = explore(Small(SMALL[name]))
    assert not found.counterexample, f"\n{found.counterexample}"
    assert found.states > 500


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: str(mistake.__name__))
def test_each_mistake_is_found(mistake: type[Spec]) -> None:
    """Fault M2: a specification with a mistake is found to break the expected rule, and the shortest path is shown."""
    plan, rule = MISTAKES[mistake]
    is_found(explore(Small(plan, mistake)), rule)


def is_found(found: Explored, rule: str) -> None:
    """Assert that the shortest path to a state that breaks a rule was found."""
    *steps, broken = found.counterexample.splitlines() or [""]
    assert broken.startswith(f"{rule}:"), found.counterexample
    assert len(steps) == found.depth
    assert steps[0].startswith("   1. ")


@pytest.mark.parametrize("name", FIRING)
def test_each_instant_is_fired_once_in_every_state(name: str) -> None:
    """U13, U14, fault M2: with repeated requests, changes and full queues, each instant is over exactly once."""
    found = explore(Firing(FIRING[name]))
    assert not found.counterexample, f"\n{found.counterexample}"
    assert found.states > 500


@pytest.mark.parametrize("mistake", FIRING_MISTAKES, ids=lambda mistake: str(mistake.__name__))
def test_each_mistake_of_schedules_is_found(mistake: type[Schedules]) -> None:
    """U13, fault M2: a specification of schedules with a mistake is found to break the expected rule."""
    bounds, rule = FIRING_MISTAKES[mistake]
    is_found(explore(Firing(bounds, mistake)), rule)


def test_a_way_can_be_read() -> None:
    """Fault M2: a counterexample is readable: it lists the steps up to the broken law."""
    mistake = next(one for one in MISTAKES if one.__name__ == "ForgetsConsumers")
    found = explore(Small(MISTAKES[mistake][0], mistake))
    assert found.counterexample.splitlines() == [
        "   1. publish a1: 0",
        "   2. w1.1 receives: a1 (receipt 1)",
        "   3. maintain gives w1.1 up: done",
        "R1: a1 waits where no receive finds it",
    ]


def test_a_publisher_must_wait_for_its_replica() -> None:
    """Fault M2: a failover loses nothing that a replica confirmed; a publisher that does not wait for it is found."""
    assert not explore(Small(REPLICATED)).counterexample
    assert "a replica has confirmed a1, and it is gone" in explore(Hasty(REPLICATED)).counterexample


def test_too_many_states_are_no_success() -> None:
    """An exploration that exceeds its maximum number of states fails instead of passing."""
    with pytest.raises(OverflowError):
        explore(Small(REPLICATED), most=10)

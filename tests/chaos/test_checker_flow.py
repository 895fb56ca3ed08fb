"""The checker's rules for workflows and schedules find false records, and accept true ones."""

from __future__ import annotations

import pytest

from tests.chaos.checker import check
from tests.chaos.history import What
from tests.chaos.story import Dump, Known
from tests.chaos.synthetic import WALL, Simulation
from tests.chaos.verdicts import broken

KEY = "q"


class Flow(Simulation):
    """A workflow of a parent and a child, and an instant of a schedule, as the processes record them."""

    def __init__(self, when: str = "done") -> None:
        super().__init__()
        self.states: dict[str, str] = {}
        self.note(What.STARTED, "p", wall=WALL)
        self.note(What.STARTED, "s1", wall=WALL)
        self._publish("parent", origin="step")
        self._publish("child", origin="step", after=(f"{KEY}/parent",), when=when)
        self._publish("tick", origin="schedule", not_before=self.at + WALL)

    def _publish(self, task: str, **fields: object) -> None:
        call = self.call()
        self.note(What.PUBLISH, "p", key=KEY, task=task, call=call, payload="x", **fields)
        self.note(What.PUBLISHED, "p", key=KEY, task=task, call=call, outcome="accepted")

    def work(self, task: str, verb: str = "ack", number: int = 1) -> None:
        """Deliver a task and settle it."""
        call = self.call()
        told = {"key": KEY, "task": task, "receipt": f"{task}{number}", "attempt": 1}
        self.note(What.DELIVERED, "s1", store_at=self.at + WALL, **told)
        self.note(What.SETTLE, "s1", call=call, verb=verb, **told)
        self.note(What.SETTLED, "s1", call=call, verb=verb, outcome="ok", **told)
        self.states[task] = "done" if verb == "ack" else "dead"

    def fire(self, *outcomes: str, task: str = "tick") -> None:
        """Record what the store says of an instant."""
        for outcome in outcomes:
            self.note(What.FIRED, "world", key=KEY, task=task, outcome=outcome, count=1)

    def broken(self, **states: str) -> set[str]:
        """Return the rules that the history breaks."""
        known = {task: Known(state) for task, state in {**self.states, **states}.items()}
        ledger = {"published": len(known)}
        for one in known.values():
            ledger[one.state] = ledger.get(one.state, 0) + 1
        dead = tuple(task for task, one in known.items() if one.state == "dead")
        dump = Dump(tasks={KEY: dict(known)}, ledgers={KEY: ledger}, dead_letters={KEY: dead})
        return broken(check(self.events, dump))


def whole(when: str = "done") -> Flow:
    """Return a history in which everything but the workflow has happened."""
    flow = Flow(when)
    flow.work("tick")
    flow.fire("accepted")
    return flow


def test_a_true_history() -> None:
    """U16: a child that runs after its parent breaks no rule, and is counted."""
    flow = whole()
    flow.work("parent")
    flow.work("child")
    assert flow.broken() == set()


def test_a_release_before_the_condition() -> None:
    """U16: a child that is delivered before its parent was acknowledged breaks the rule."""
    flow = whole()
    flow.work("child")
    flow.work("parent")
    assert flow.broken() == {"after"}


@pytest.mark.parametrize(("when", "verb"), [("done", "dead_letter"), ("failed", "ack")])
def test_a_release_although_the_condition_is_not_met(when: str, verb: str) -> None:
    """U16: a dead parent does not release what waits for its success, nor a done one what waits for a failure."""
    flow = whole(when)
    flow.work("parent", verb)
    flow.work("child")
    assert "after" in flow.broken()


def test_a_child_that_is_cancelled_without_a_reason() -> None:
    """U16: a child whose parents are all done must run; one whose parent was discarded must not."""
    flow = whole()
    flow.work("parent")
    assert flow.broken(child="cancelled") == {"after"}
    assert "after" in whole().broken(parent="discarded", child="done")


def test_a_child_that_is_never_released() -> None:
    """U16: a child that is blocked at the end breaks the rule that all tasks end."""
    flow = whole()
    flow.work("parent")
    assert flow.broken(child="blocked") == {"R14"}


@pytest.mark.parametrize("outcomes", [(), ("accepted", "accepted"), ("late",)])
def test_an_instant_is_fired_once(outcomes: tuple[str, ...]) -> None:
    """U14: an instant that was lost, fired twice or skipped breaks the rule; so does one that nobody expects."""
    flow = Flow()
    for task in ("tick", "parent", "child"):
        flow.work(task)
    flow.fire(*outcomes)
    assert flow.broken() == {"instants"}
    flow = whole()
    flow.work("parent")
    flow.work("child")
    flow.fire("accepted", task="another")
    assert flow.broken() == {"instants"}

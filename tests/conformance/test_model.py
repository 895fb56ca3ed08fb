"""The model in the state machine, checked with fixed histories that random ones rarely contain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from taskqueue_conformance.model import moves
from taskqueue_conformance.model.machine import MachineSuite, QueueMachine
from taskqueue_core.after import TaskRef
from taskqueue_core.capabilities import Order
from taskqueue_core.rate_limit import RateLimit
from tests.conformance import broken_dependencies as dependencies
from tests.conformance import broken_flow as flow
from tests.conformance import broken_order as order
from tests.conformance import broken_schedules as schedules
from tests.conformance import broken_unique as unique
from tests.conformance.facade import Broken, Facade
from tests.conformance.runner import suite_on

FIELDS: dict[str, Any] = {
    "payload": 1,
    "priority": 5,
    "tenant": "a",
    "ordering_key": None,
    "not_before": None,
    "deadline": None,
}
FIFO: dict[str, Any] = {
    "order": Order.FIFO,
    "weights": {},
    "paused_tenants": (),
    "tenant_capacity": None,
    "tenant_max_inflight": None,
    "tenant_rate_limit": None,
    "floor_share": 0.0,
}
FAIR = FIFO | {"order": Order.FAIR}


def publish(state: QueueMachine, *names: str, **fields: Any) -> None:
    """Publish tasks to one queue, of tenant ``a`` unless ``fields`` says otherwise."""
    state.publish("alpha", list(names), FIELDS | fields)


def take_turns(state: QueueMachine) -> None:
    """Serve two tenants in fair order, one with many tasks and one with a single task."""
    state.arrange("alpha", FAIR)
    publish(state, "t1", "t2", "t3", "t4")
    publish(state, "t5", tenant="b")
    state.serve([0, 1, 0, 1, 0])


def limit_tenants(state: QueueMachine) -> None:
    """Limit each tenant to one task in flight."""
    state.arrange("alpha", FAIR | {"tenant_max_inflight": 1})
    publish(state, "t1", "t2")
    publish(state, "t5", tenant="b")
    state.serve([0, 1, 0])
    state.ack(0, [1])
    state.serve([0, 1])


def bound_tenants(state: QueueMachine) -> None:
    """Set small capacities for the queue and for each tenant."""
    state.limit("alpha", {"capacity": 2})
    state.arrange("alpha", FAIR | {"tenant_capacity": 1})
    publish(state, "t1", "t2")
    publish(state, "t3", tenant="b")
    publish(state, "t4", tenant=None)


def spend_tokens(state: QueueMachine) -> None:
    """Limit each tenant to one token per second."""
    state.arrange("alpha", FAIR | {"tenant_rate_limit": RateLimit(max_tokens=1)})
    publish(state, "t1", "t2", "t3")
    publish(state, "t4", tenant="b")
    state.serve([0, 1])
    state.redeliver(0, [1])
    state.serve([0, 1])
    state.advance(4)
    state.serve([0, 1])


def share(state: QueueMachine) -> None:
    """Give the lower of two priorities half of the deliveries."""
    state.arrange("alpha", FIFO | {"floor_share": 0.5})
    publish(state, "t1", "t2", "t3")
    publish(state, "t4", "t5", "t6", priority=8)
    state.serve([0, 1, 0, 1, 0, 1])


def share_of_three(state: QueueMachine) -> None:
    """Give each of three priorities a third of the deliveries."""
    state.arrange("alpha", FIFO | {"floor_share": 0.5})
    for number, priority in enumerate((2, 5, 8)):
        publish(state, *(f"t{5 * number + n}" for n in range(5)), priority=priority)
    state.serve([0, 1, 0, 1, 0, 1, 0, 1])


def share_alike(state: QueueMachine) -> None:
    """Give the lower of two priorities half of the deliveries, then switch to strict priority order."""
    share(state)
    state.close(0)
    state.close(1)
    state.arrange("alpha", FIFO)
    state.serve([0, 1, 0, 1, 0, 1])


def hold(state: QueueMachine) -> None:
    """Publish three tasks with one ordering key, the last with a higher priority."""
    publish(state, "t1", "t2", ordering_key="e")
    publish(state, "t3", ordering_key="e", priority=8)
    state.serve([0, 1])
    state.redeliver(0, [0])
    state.serve([0, 1])
    state.ack(0, [0])
    state.serve([0, 1])
    state.retry(0, 1)
    state.serve([0, 1])
    state.advance(1)
    state.serve([0, 1])
    state.dead_letter(0, 0)
    state.serve([0, 1])
    state.redrive("alpha", [])
    state.serve([0, 1])


def expire_a_holder(state: QueueMachine) -> None:
    """Let an overdue task hold the ordering key of a task with a higher priority; deliver the other two."""
    publish(state, "t1", ordering_key="e", not_before=1, deadline=1)
    publish(state, "t2")
    state.advance(1)
    publish(state, "t3", ordering_key="e", priority=8)
    state.receive(0, 2)
    assert [delivery.task.id for delivery in state.deliveries] == ["t2", "t3"]


def hang(state: QueueMachine) -> None:
    """Run two tasks of which one stalls and the other reports progress."""
    state.limit("alpha", {"max_processing_time": 4})
    publish(state, "t1", "t2")
    state.serve([0, 1])
    state.advance(2)
    state.progress(0)
    state.maintain(2)
    state.serve([0, 1])
    state.maintain(4)


def count_members(state: QueueMachine) -> None:
    """Close a batch with a dead letter; its callback comes when the member is redriven and done."""
    batch = TaskRef("alpha", "b1")
    state.begin_batch("b1")
    publish(state, "t1", "t2", batch=batch)
    publish(
        state,
        "t3",
        after={"tasks": [batch], "when": "done", "on_dead": "hold", "inputs": False},
    )
    state.serve([0, 1])
    state.dead_letter(0, 1)
    state.ack(0, [0])
    state.close_batch("b1")
    publish(state, "t4", batch=batch)
    state.redrive("alpha", [])
    state.receive(0, 1)
    state.ack(0, [0])
    state.receive(0, 1)
    assert [delivery.task.id for delivery in state.deliveries] == ["t1", "t2", "t1", "t3"]


def claim(state: QueueMachine) -> None:
    """Publish tasks with one unique key; its holder is cancelled, and another one runs and becomes a dead letter."""
    claims = {"key": "u", "period": None, "until": "ended", "debounce": None, "on_conflict": "keep"}
    publish(state, "t1", "t2", unique=claims)
    state.cancel("alpha", "t1")
    publish(state, "t3", unique=claims)
    publish(state, "t4", unique=claims | {"on_conflict": "refuse"})
    state.receive(0, 1)
    publish(state, "t5", unique=claims)
    state.dead_letter(0, 0)
    publish(state, "t6", unique=claims)


def fire(state: QueueMachine) -> None:
    """Fire a schedule: in time, by plans for another time or version, and for a full queue; then change it."""
    state.limit("alpha", {"capacity": 2})
    put(state, units=0, keep_next=False)
    for planned in ("late", "old", "now"):
        state.fire(key="alpha", name="s1", chosen=["t1"], fields=FIELDS, units=1, planned=planned)
    for chosen in (["t2", "t3"], ["t3"]):
        state.advance(4)
        state.fire(key="alpha", name="s1", chosen=chosen, fields=FIELDS, units=2, planned="now")
    put(state, units=5, keep_next=True)


def put(state: QueueMachine, *, units: int, keep_next: bool) -> None:
    """Put the schedule of `fire`."""
    state.put(key="alpha", name="s1", units=units, spec=b"1", version=None, keep_next=keep_next)


def wait_for_another(state: QueueMachine) -> None:
    """Publish a task that waits for two others of another queue, with their results as inputs, and run all."""
    parents = [TaskRef("beta", "t1"), TaskRef("beta", "t2")]
    state.publish("beta", ["t1", "t2"], FIELDS)
    publish(
        state,
        "t3",
        after={"tasks": parents, "when": "done", "on_dead": "hold", "inputs": True},
    )
    state.serve([0, 1])
    state.ack(0, [0])
    state.ack(0, [1])
    state.serve([0])
    assert [delivery.task.id for delivery in state.deliveries] == ["t1", "t2", "t3"]


HISTORIES = (
    take_turns,
    limit_tenants,
    bound_tenants,
    spend_tokens,
    share,
    share_of_three,
    share_alike,
    hold,
    expire_a_holder,
    hang,
    count_members,
    claim,
    fire,
    wait_for_another,
)
FINDS: tuple[tuple[Broken, Callable[[QueueMachine], None], str], ...] = (
    (order.StartsAnew, take_turns, "'a' had 3 turns while 'b' waited"),
    (order.ForgetsTenants, limit_tenants, "too many tasks of the tenant 'a' are in flight"),
    (order.GivesTenantsOneTooMany, limit_tenants, "too many tasks of the tenant 'a' are in flight"),
    (order.UnboundedByTenants, bound_tenants, "publish answered accepted"),
    (order.RefundsTenants, spend_tokens, "without a token"),
    (order.ServesTheLowest, share_of_three, "deliveries of other priorities while priority 5"),
    (order.ReleasesByPriority, hold, "with its ordering key"),
    (order.ReleasesOnHandBack, hold, "with its ordering key"),
    (order.ReleasesOnRetry, hold, "with its ordering key"),
    (order.HoldsForTheDead, hold, "available tasks were not delivered"),
    (flow.EndsTheHealthy, hang, "wrong state .* expected in_flight"),
    (flow.HangsForNothing, hang, "wrong .* of alpha/t1: expected"),
    (flow.NeverEndsTheHung, hang, "wrong state .* expected waiting"),
    (dependencies.SealsNothing, count_members, "publish answered accepted"),
    (dependencies.CountsTheDead, count_members, "wrong state of alpha/b1: expected blocked"),
    (dependencies.DoesNotWait, wait_for_another, "wrong state of alpha/t3: expected blocked"),
    (dependencies.MixesInputs, wait_for_another, "wrong inputs of alpha/t3"),
    (unique.KeepsNothingOut, claim, "publish answered accepted"),
    (unique.LooksOncePerBatch, claim, "publish answered accepted"),
    (unique.LetsTheEndedHold, claim, "publish answered duplicate"),
    (unique.LetsTheDeadHold, claim, "publish answered duplicate"),
    (unique.KeepsInsteadOfRefusing, claim, "publish answered duplicate"),
    (unique.HoldsUntilTheDelivery, claim, "not delivered as it was published"),
    (schedules.FiresTwice, fire, "answered Fired.stale=False"),
    (schedules.FiresOldPlans, fire, "answered Fired.stale=False"),
    (schedules.MovesOnWhenRefused, fire, "wrong schedules: "),
    (schedules.ForgetsTheRefused, fire, "wrong schedules: "),
    (schedules.HidesOthers, fire, "wrong time of the next schedule"),
    (schedules.TurnsBack, fire, "wrong schedule: "),
)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Broken], QueueMachine]]:
    """Return a function that opens the state machine on a backend, to be driven by a fixed history."""
    monkeypatch.setattr(moves, "note", lambda _: None)
    made: list[QueueMachine] = []

    def make(backend: Broken) -> QueueMachine:
        by_hand = type("ByHand", (QueueMachine,), {"harness": suite_on(backend, MachineSuite)})
        made.append(by_hand())
        made[-1].open(({}, {}), (FIFO, FIFO))
        return made[-1]

    yield make
    for one in made:
        one.teardown()


@pytest.mark.parametrize("history", HISTORIES)
def test_nothing_is_wrong(
    machine: Callable[[Broken], QueueMachine], history: Callable[[QueueMachine], None]
) -> None:
    """The model reports no error for a correct backend (laws 4, 5, 6)."""
    state = machine(Facade)
    history(state)
    assert state.deliveries or state.model.entries


@pytest.mark.parametrize(("backend", "history", "told"), FINDS)
def test_it_is_found(
    machine: Callable[[Broken], QueueMachine],
    backend: Broken,
    history: Callable[[QueueMachine], None],
    told: str,
) -> None:
    """The model reports the defect of a broken backend (laws 4, 5, 6)."""
    state = machine(backend)
    with pytest.raises(AssertionError, match=told):
        history(state)

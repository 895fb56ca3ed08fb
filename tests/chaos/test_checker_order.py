"""The checker's rules for ordering keys, tenants, priorities and hung tasks, tested on handmade histories."""

from __future__ import annotations

import pytest
from msgspec import structs

from tests.chaos.checker import check
from tests.chaos.history import What
from tests.chaos.synthetic import WALL, Simulation
from tests.chaos.verdicts import broken, finished


def test_an_ordering_key_in_flight_twice() -> None:
    """R8: two tasks of one ordering key in flight at the same time are a violation."""
    run = Simulation()
    run.publish("p", "t1", "t2", ordering_key="user")
    run.receive("c1", 1)
    run.tasks["t2"]["ordering_key"] = ""
    run.receive("c1", 1)
    assert broken(finished(run)) == {"R8"}


@pytest.mark.parametrize(
    ("older", "newer", "scheduled", "rules"),
    [
        ("<s1@1x4>r1", "<s3@2x8>r2", "t1", set()),
        ("<s1@1x4>r1", "<s3@2x8>r2", "t2", {"R8"}),
        ("<s1@1x4>r1", "<s3@2x8>r2", "", {"R8"}),
        ("<s1@2x8>r1", "<s1@2x8>r2", "t1", {"R8"}),
        ("r1", "<s1@1x8>r2", "t1", set()),
    ],
)
def test_an_ordering_key_in_two_generations(
    older: str, newer: str, scheduled: str, rules: set[str]
) -> None:
    """R8: after a change of the number of shards, only a task scheduled before it may run while a newer one does."""
    run = Simulation()
    run.publish("p", "t1", "t2", ordering_key="user")
    run.receive("c1", 1)
    run.tasks["t2"]["ordering_key"] = ""
    run.receive("c1", 1)
    run.note(What.SETTINGS, "world", key=run.key, name="shards", value=8)
    run.settle("c1", "r1", "ack")
    run.settle("c1", "r2", "ack")
    receipts = {"r1": older, "r2": newer}
    events = [
        structs.replace(
            event,
            receipt=receipts.get(event.receipt, event.receipt),
            not_before=WALL if event.what is What.PUBLISH and event.task == scheduled else None,
        )
        for event in run.events
    ]
    assert broken(check(events, run.dump())) == rules


@pytest.mark.parametrize("verb", ["retry", "redeliver"])
def test_an_ordering_key_is_held_until_the_end(verb: str) -> None:
    """R8: a returned or retried task still blocks its ordering key; delivering the next task is a violation."""
    run = Simulation()
    run.publish("p", "t1", "t2", "t3", ordering_key="user")
    (receipt,) = run.receive("c1", 10)
    run.settle("c1", receipt, verb, delay=1.0)
    run.tasks["t2"]["since"] = 0.0  # make the simulated store deliver t2 first
    run.receive("c1", 1)
    assert "R8" in broken(finished(run))


@pytest.mark.parametrize("verb", ["ack", "retry", "redeliver", "dead_letter"])
def test_ordering_keys_one_after_another(verb: str) -> None:
    """R8: tasks of one key, delivered after the previous was settled or lost, are no violation."""
    run = Simulation()
    run.publish("p", "t1", "t2", "t3", ordering_key="user")
    run.publish("p", "u1", "u2", ordering_key="other")
    run.publish("p", "v1")
    for receipt in run.receive("c1", 10):
        run.settle("c1", receipt, verb)
    run.receive("c1", 10)
    run.note(What.KILLED, "world", target="c1")
    run.at += 10.0
    run.take_back("c1")
    verdict = finished(run)
    assert verdict.ok, str(verdict)


def test_an_ordering_key_out_of_order() -> None:
    """R8: delivering the second task of an ordering key before the first is a violation."""
    run = Simulation()
    run.publish("p", "t1", ordering_key="user", priority=3)
    run.publish("p", "t2", ordering_key="user", priority=3)
    run.tasks["t1"]["since"] = 99.0
    assert broken(finished(run)) == {"R8"}


def test_a_lower_priority_in_between() -> None:
    """Rule class: delivering a low priority while a high one has been waiting for long is a violation."""
    run = Simulation()
    run.publish("p", "low", priority=1)
    run.publish("p", "high", priority=9)
    run.at += 1.0
    run.tasks["high"]["priority"] = 0
    run.receive("c1", 1)
    assert broken(finished(run)) == {"class"}


def publish_two_classes(run: Simulation, number: int) -> None:
    """Publish tasks of a low priority, then the same number of a high one."""
    run.publish("p", *(f"low{n}" for n in range(number)), priority=1)
    run.publish("p", *(f"high{n}" for n in range(number)), priority=9)
    run.at += 1.0


@pytest.mark.parametrize(("share", "rules"), [(0.1, set()), (0.25, set()), (0.0, {"floor"})])
def test_the_share_of_the_lowest(share: float, rules: set[str]) -> None:
    """Rule floor: a promised share that is given breaks no rule; a store that gives nothing of it does."""
    run = Simulation()
    run.order(floor=0.1 if share == 0.1 else 0.25)
    run.floor = share
    publish_two_classes(run, 60)
    assert broken(finished(run)) == rules


@pytest.mark.parametrize("starves", [False, True])
def test_the_share_of_each(*, starves: bool) -> None:
    """Rule floor: a store that serves only the highest and the lowest of three priorities breaks it (OPEN-C8)."""
    run = Simulation()
    run.order(floor=0.1)
    run.starves_between = starves
    publish_two_classes(run, 60)
    run.publish("p", *(f"middle{n}" for n in range(60)), priority=5)
    run.at += 1.0
    assert broken(finished(run)) == ({"floor"} if starves else set())


def publish_two_tenants(run: Simulation) -> None:
    """Publish many tasks of one tenant, then a few of another."""
    run.publish("p", *(f"m{n}" for n in range(50)), tenant="many")
    run.publish("p", *(f"f{n}" for n in range(5)), tenant="few")
    run.at += 1.0


def test_tenants_that_take_turns() -> None:
    """Rule fair: tenants that take turns break no rule; one that waits for all tasks of another tenant breaks it."""
    for fair, rules in ((True, set()), (False, {"fair"})):
        run = Simulation()
        run.order(fair=True)
        run.fair = fair
        publish_two_tenants(run)
        assert broken(finished(run)) == rules


def test_turns_by_weight() -> None:
    """Rule fair: a tenant with a high weight may get many deliveries in a row."""
    run = Simulation()
    run.order(fair=True)
    run.fair = False
    run.note(What.SETTINGS, "op", key="q", name="weight", target="many", value=100.0)
    publish_two_tenants(run)
    verdict = finished(run)
    assert verdict.ok, str(verdict)


def test_the_order_of_a_tenant() -> None:
    """R7: with fair order, the tasks of one tenant must stay in order; there is no order between tenants."""
    run = Simulation()
    run.order(fair=True)
    publish_two_tenants(run)
    run.tasks["f0"]["place"] = (99, 2)
    assert broken(finished(run)) == {"R7"}


@pytest.mark.parametrize("lag", [0.0, 5.0])
def test_a_scheduled_task_that_is_overtaken(lag: float) -> None:
    """R7: a task may be delivered before a scheduled one that is not due on the store's clock, but not after that."""
    run = Simulation()
    run.note(What.STARTED, "c", wall=WALL)
    run.publish("p", "scheduled", delay=1.0)
    run.at += 2.0
    run.lag = lag
    run.publish("p", "plain")
    if not lag:
        run.tasks["scheduled"]["place"] = (99, 2)
    run.receive("c", 1)
    run.at += lag
    assert broken(finished(run)) == (set() if lag else {"R7"})


def test_a_limit_per_tenant() -> None:
    """R10: two tasks of one tenant in flight break a limit of one per tenant; one task each of two tenants do not."""
    for second, rules in (("one", {"R10"}), ("two", set())):
        run = Simulation()
        run.note(What.SETTINGS, "op", key="q", name="tenant_limit", value=1.0)
        run.publish("p", "t1", tenant="one")
        run.publish("p", "t2", tenant=second)
        run.receive("c1", 2)
        assert broken(finished(run)) == rules


def test_a_rate_per_tenant() -> None:
    """R11: two deliveries of one tenant at once break a limit of one token per tenant; those of two tenants do not."""
    for second, rules in (("one", {"R11"}), ("two", set())):
        run = Simulation()
        for name in ("tenant_rate", "tenant_burst"):
            run.note(What.SETTINGS, "op", key="q", name=name, value=1.0)
        run.publish("p", "t1", tenant="one")
        run.publish("p", "t2", tenant=second)
        assert broken(finished(run)) == rules


@pytest.mark.parametrize(("after", "rules"), [(0.5, {"budget"}), (2.5, set())])
def test_a_delivery_that_hangs(after: float, rules: set[str]) -> None:
    """Budget: a delivery may be repeated only after it was held for the queue's maximum processing time."""
    run = Simulation()
    run.note(What.SETTINGS, "op", key="q", name="max_processing", value=2.0)
    run.publish("p", "t1")
    run.receive("c1")
    run.at += after
    run.take_back("c1")
    assert broken(finished(run)) == rules

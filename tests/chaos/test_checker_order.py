"""What the checker demands of ordering keys, tenants, priorities and hung tasks, on histories made by hand."""

from __future__ import annotations

import pytest

from tests.chaos.history import What
from tests.chaos.synthetic import Simulation
from tests.chaos.verdicts import broken, finished


def test_an_ordering_key_in_flight_twice() -> None:
    """R8: two tasks of one ordering key side by side."""
    run = Simulation()
    run.publish("p", "t1", "t2", ordering_key="user")
    run.receive("c1", 1)
    run.tasks["t2"]["ordering_key"] = ""
    run.receive("c1", 1)
    assert broken(finished(run)) == {"R8"}


@pytest.mark.parametrize("verb", ["retry", "redeliver"])
def test_an_ordering_key_is_held_until_the_end(verb: str) -> None:
    """R8: what comes back, or is tried again, holds its key meanwhile; the next one in between is a lie."""
    run = Simulation()
    run.publish("p", "t1", "t2", "t3", ordering_key="user")
    (receipt,) = run.receive("c1", 10)
    run.settle("c1", receipt, verb, delay=1.0)
    run.tasks["t2"]["since"] = 0.0  # the store forgets who was first
    run.receive("c1", 1)
    assert "R8" in broken(finished(run))


@pytest.mark.parametrize("verb", ["ack", "retry", "redeliver", "dead_letter"])
def test_ordering_keys_one_after_another(verb: str) -> None:
    """R8: settled in any way, killed, then the next: nothing is wrong, and others pass by."""
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
    """R8: the second of a key comes first, of another priority though it is."""
    run = Simulation()
    run.publish("p", "t1", ordering_key="user", priority=3)
    run.publish("p", "t2", ordering_key="user", priority=3)
    run.tasks["t1"]["since"] = 99.0
    assert broken(finished(run)) == {"R8"}


def test_a_lower_priority_in_between() -> None:
    """Rule class: a low one goes out while a high one has been waiting for long."""
    run = Simulation()
    run.publish("p", "low", priority=1)
    run.publish("p", "high", priority=9)
    run.at += 1.0
    run.tasks["high"]["priority"] = 0
    run.receive("c1", 1)
    assert broken(finished(run)) == {"class"}


def publish_two_classes(run: Simulation, number: int) -> None:
    """Publish low ones, then high ones."""
    run.publish("p", *(f"low{n}" for n in range(number)), priority=1)
    run.publish("p", *(f"high{n}" for n in range(number)), priority=9)
    run.at += 1.0


@pytest.mark.parametrize(("share", "rules"), [(0.1, set()), (0.25, set()), (0.0, {"floor"})])
def test_the_share_of_the_lowest(share: float, rules: set[str]) -> None:
    """Rule floor: a quarter is promised; who gives it passes, who gives a tenth of that, or nothing, does not."""
    run = Simulation()
    run.order(floor=0.1 if share == 0.1 else 0.25)
    run.floor = share
    publish_two_classes(run, 60)
    assert broken(finished(run)) == rules


def publish_two_tenants(run: Simulation) -> None:
    """Publish many tasks of one tenant, then some of another."""
    run.publish("p", *(f"m{n}" for n in range(50)), tenant="many")
    run.publish("p", *(f"f{n}" for n in range(5)), tenant="few")
    run.at += 1.0


def test_tenants_that_take_turns() -> None:
    """Rule fair: one of each in turn; without it the few wait for the many, which is a lie where fair was promised."""
    for fair, rules in ((True, set()), (False, {"fair"})):
        run = Simulation()
        run.order(fair=True)
        run.fair = fair
        publish_two_tenants(run)
        assert broken(finished(run)) == rules


def test_turns_by_weight() -> None:
    """Rule fair: who has the weight for it may have ten turns to one."""
    run = Simulation()
    run.order(fair=True)
    run.fair = False
    run.note(What.SETTINGS, "op", key="q", name="weight", target="many", value=100.0)
    publish_two_tenants(run)
    verdict = finished(run)
    assert verdict.ok, str(verdict)


def test_the_order_of_a_tenant() -> None:
    """R7: with fair order, tasks of one tenant keep theirs, and those of two tenants have none between them."""
    run = Simulation()
    run.order(fair=True)
    publish_two_tenants(run)
    run.tasks["f0"]["place"] = (99, 2)
    assert broken(finished(run)) == {"R7"}


def test_a_limit_per_tenant() -> None:
    """R10: one tenant has two in flight where each may have one; with one of each nothing is wrong."""
    for second, rules in (("one", {"R10"}), ("two", set())):
        run = Simulation()
        run.note(What.SETTINGS, "op", key="q", name="tenant_limit", value=1.0)
        run.publish("p", "t1", tenant="one")
        run.publish("p", "t2", tenant=second)
        run.receive("c1", 2)
        assert broken(finished(run)) == rules


def test_a_rate_per_tenant() -> None:
    """R11: a burst of one tenant, where each may have a token at a time."""
    for second, rules in (("one", {"R11"}), ("two", set())):
        run = Simulation()
        for name in ("tenant_rate", "tenant_burst"):
            run.note(What.SETTINGS, "op", key="q", name=name, value=1.0)
        run.publish("p", "t1", tenant="one")
        run.publish("p", "t2", tenant=second)
        assert broken(finished(run)) == rules


@pytest.mark.parametrize(("after", "rules"), [(0.5, {"budget"}), (2.5, set())])
def test_a_delivery_that_hangs(after: float, rules: set[str]) -> None:
    """Budget: what was in hand for longer than the queue allows may come again, and not before."""
    run = Simulation()
    run.note(What.SETTINGS, "op", key="q", name="max_processing", value=2.0)
    run.publish("p", "t1")
    run.receive("c1")
    run.at += after
    run.take_back("c1")
    assert broken(finished(run)) == rules

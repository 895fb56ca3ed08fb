"""The checker detects violations of every rule, made by hand or at random, and accepts valid histories."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chaos.checker import RULES, check
from tests.chaos.history import What
from tests.chaos.mutations import MUTATIONS, Mutation
from tests.chaos.story import Dump, Known, Terms
from tests.chaos.synthetic import WALL, RandomRun, Simulation
from tests.chaos.verdicts import broken, finished

seeds = st.integers(0, 2**32)


@pytest.fixture
def run() -> Simulation:
    """A history with three tasks, two of which were delivered to c1."""
    run = Simulation()
    for name in ("p", "c1", "c2"):
        run.note(What.STARTED, name, wall=WALL)
    run.publish("p", "t1", "t2", "t3")
    run.receive("c1", 2)
    return run


@settings(max_examples=40, deadline=None)
@given(seeds)
def test_valid_histories_pass(seed: int) -> None:
    """Random valid runs, with kills, freezes and lost answers, break no rule."""
    run = RandomRun(seed)
    verdict = check(run.events, run.dump())
    assert verdict.ok, str(verdict)
    assert verdict.figures.lost == 0
    assert verdict.figures.duplicates <= verdict.figures.held


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_false_record_is_found(mutation: Mutation) -> None:
    """A random false record in a random valid run is detected by one of the rules made for it."""
    seen = 0
    for seed in range(25):
        run = RandomRun(seed)
        mutant = mutation.mutate(seed, run.events, run.dump())
        if mutant is None:
            continue
        seen += 1
        verdict = check(*mutant)
        assert broken(verdict) & mutation.rules, f"seed {seed}: {verdict}"
    assert seen >= 3, "the mutation applied too rarely to prove anything"


def test_every_rule_has_a_test() -> None:
    """Every rule is covered by a mutation or by a test of its own."""
    by_hand = {"R8", "R15", "R16", "class", "floor", "fair", "log", "once", "slots", "ends"}
    by_hand |= {"after", "instants"}
    assert {rule for one in MUTATIONS for rule in one.rules} | by_hand == set(RULES)


def test_a_payload_that_changes(run: Simulation) -> None:
    """R0: two different payloads confirmed for one id are a violation."""
    for what in (What.PUBLISH, What.PUBLISHED):
        told = {"outcome": "duplicate"} if what is What.PUBLISHED else {"payload": "other"}
        run.note(what, "p", call=99, key="q", task="t1", **told)
    assert broken(finished(run)) == {"R0"}


def test_a_task_from_nowhere(run: Simulation) -> None:
    """R1: a ledger that counts a task which was never published is a violation."""
    dump = run.dump()
    ledger = dump.ledgers["q"]
    ledger["published"] += 1
    ledger["waiting"] += 1
    assert "R1" in broken(check(run.events, dump))


def test_an_unconfirmed_task_may_be_there_or_not(run: Simulation) -> None:
    """R1: a task whose publish got no answer may or may not exist; neither is a violation."""
    run.publish("p", "t4", outcome="unconfirmed")
    run.note(What.PUBLISH, "p", call=98, key="q", task="t5", payload="p")
    verdict = finished(run)
    assert verdict.ok, str(verdict)
    assert verdict.figures.unknown == 2


def test_a_limit_that_is_kept(run: Simulation) -> None:
    """R10: three tasks delivered one after the other under a limit of 2 are no violation."""
    run.note(What.SETTINGS, "op", key="q", name="limit", value=2.0)
    verdict = finished(run)
    assert verdict.ok, str(verdict)


def test_a_limit_that_was_lowered(run: Simulation) -> None:
    """R10: when a limit is lowered, tasks in flight may finish, but no other task may be delivered."""
    lowered = [("limit", 2.0), ("limit", None), ("limit", 1.0)]
    for name, value in lowered:
        run.note(What.SETTINGS, "op", key="q", name=name, value=value)
    run.at += 1.0
    receipts = list(run.held)
    run.settle("c1", receipts[0], "ack")
    assert not broken(check(run.events, run.dump())) & {"R10"}
    run.receive("c2", 1)
    assert "R10" in broken(check(run.events, run.dump()))


def test_a_limit_that_was_taken_away(run: Simulation) -> None:
    """R10, R11: deliveries before a limit was set or after it was removed do not count."""
    for name, value in (("limit", 1.0), ("rate", 1.0), ("burst", 1.0)):
        run.note(What.SETTINGS, "op", key="q", name=name, value=value)
    run.at += 1.0
    for name in ("limit", "rate", "burst"):
        run.note(What.SETTINGS, "op", key="q", name=name)
    run.publish("p", *(f"t{n}" for n in range(4, 9)))
    verdict = finished(run)
    assert verdict.ok, str(verdict)


@pytest.mark.parametrize(("gap", "rules"), [(0.05, {"R11"}), (0.2, set())])
def test_a_token_bucket(gap: float, rules: set[str]) -> None:
    """R11: with a burst of 2 and 10 per second, one delivery every 0.2 s is allowed, one every 0.05 s is not."""
    run = Simulation()
    run.note(What.SETTINGS, "op", key="q", name="rate", value=10.0)
    run.note(What.SETTINGS, "op", key="q", name="burst", value=2.0)
    run.publish("p", *(f"t{n}" for n in range(8)))
    for _ in range(8):
        run.receive("c1", 1)
        run.at += gap
    assert broken(finished(run)) == rules


def test_a_redelivery_in_a_pause(run: Simulation) -> None:
    """R12: a redelivery during a pause is a violation, although the task was delivered before the pause."""
    receipt = next(iter(run.held))
    run.note(What.PAUSED, "op", key="q", store_at=run.now)
    run.settle("c1", receipt, "redeliver")
    run.at += 1.0
    run.receive("c2", 1)
    run.note(What.RESUME, "op", key="q")
    assert broken(finished(run)) == {"R12"}


def test_a_pause_that_is_kept(run: Simulation) -> None:
    """R12: a pause without deliveries, while earlier deliveries are settled, is no violation."""
    run.note(What.PAUSED, "op", key="q", store_at=run.now)
    run.at += 1.0
    run.note(What.RESUME, "op", key="q")
    verdict = finished(run)
    assert verdict.ok, str(verdict)


@pytest.mark.parametrize(
    ("ids", "ends", "right"),
    [
        (["a"], ["sent"], True),
        (["a", "a"], ["sent"], True),
        (["a", "b"], ["sent"], False),
        (["a"], ["sent", "failed"], False),
        (["a"], [], False),
        ([], [], False),
    ],
)
def test_callbacks(ids: list[str], ends: list[str], right: bool) -> None:  # noqa: FBT001 - a parametrized case
    """R15: a callback must be tried at least once, with one id, and have one final state."""
    run = Simulation()
    run.note(What.SETTINGS, "op", key="q", name="callback", value=1.0)
    run.publish("p", "t1")
    run.drain("c1")
    for one in ids:
        run.note(What.CALLBACK, "sender", key="q", task="t1", receipt=one)
    for one in ends:
        run.note(What.CALLBACK_ENDED, "sender", key="q", task="t1", outcome=one)
    assert broken(check(run.events, run.dump())) == (set() if right else {"R15"})


def test_slots() -> None:
    """R16: a slot may get a new holder only after it was freed or its holder died, and no slot may be lost."""
    run = Simulation()
    terms, dump = Terms(total_slots=1), Dump(slots={"s": ""})
    run.note(What.SLOT_TAKEN, "d1", name="s", receipt="a")
    run.note(What.SLOT_FREED, "d1", name="s", receipt="a")
    run.note(What.SLOT_TAKEN, "d2", name="s", receipt="b")
    run.note(What.KILLED, "world", target="d2")
    run.note(What.SLOT_TAKEN, "d1", name="s", receipt="c")
    assert check(run.events, dump, terms).ok
    assert broken(check(run.events, Dump(), terms)) == {"R16"}
    run.note(What.SLOT_TAKEN, "d3", name="s", receipt="d")
    assert broken(check(run.events, dump, terms)) == {"R16"}


def test_an_error_in_a_log(run: Simulation) -> None:
    """An unhandled exception in any process is a violation."""
    run.note(What.ERROR, "c1", note="ValueError")
    assert broken(finished(run)) == {"log"}


def test_a_failover_waives_what_it_may(run: Simulation) -> None:
    """If an ack was answered in the failover span, a redelivery is excused; otherwise it is a violation."""
    start = run.at + 0.0005
    (receipt, _), (other, _) = run.held.items()
    run.settle("c1", receipt, "ack")
    end = run.at
    run.settle("c1", other, "ack")
    for name in ("t1", "t2"):
        run.tasks[name]["state"] = "waiting"
    run.drain("c2")
    verdict = check(run.events, run.dump(), Terms(waived=((start, end),)))
    assert {one.task for one in verdict.waived} == {"q/t1"}
    assert {one.task for one in verdict.violations} == {"q/t2"}


def test_a_delivery_that_was_undone_may_come_again_as_it_was(run: Simulation) -> None:
    """One receipt for two deliveries of a task is excused if a failover undid the first; for two tasks it never is."""
    first, second = (event for event in run.events if event.what is What.DELIVERED)
    before = msgspec.structs.replace(first, at=run.at, store_at=run.at + WALL)
    died = run.note(What.FAULT, "world", name="fail over", target="redis 0")
    after = msgspec.structs.replace(first, at=died.at + 0.001, store_at=died.at + 0.001 + WALL)
    assert first.store_at is not None
    span = ((first.store_at - WALL - 0.0001, died.at + 0.002),)
    verdict = check([*run.events, after], run.dump(), Terms(waived=span))
    assert [(one.rule, one.task) for one in verdict.waived] == [("R0", "q/t1")]
    assert "R0" not in broken(verdict)
    assert "R0" in broken(check([*run.events, after], run.dump(), Terms()))
    assert "R0" in broken(check([*run.events, before], run.dump(), Terms(waived=span)))
    other = msgspec.structs.replace(second, at=after.at, receipt=first.receipt)
    assert "R0" in broken(check([*run.events, other], run.dump(), Terms(waived=span)))


def test_lost_publishes_are_waived_only_where_that_was_agreed(run: Simulation) -> None:
    """A publish lost in the failover span is excused only below durability ``replicated``, and is counted as lost."""
    span = ((run.at, run.at + 1.0),)
    run.publish("p", "t9")
    del run.tasks["t9"]
    run.drain("c2")
    for holder in list(run.held):
        run.settle("c1", holder, "ack")
    dump = run.dump()
    assert broken(check(run.events, dump, Terms(waived=span))) == {"R1"}
    verdict = check(run.events, dump, Terms(waived=span, may_lose_publishes=True))
    assert verdict.ok, str(verdict)
    assert verdict.figures.lost == len(verdict.waived) == 1


def test_figures() -> None:
    """Redelivery times start at the kill of the holder, recovery times at the store's return."""
    run = Simulation()
    run.publish("p", "t1")
    run.receive("c1")
    run.receive("c2")
    run.note(What.FAULT, "world", name="kill redis", target="redis")
    run.at += 2.0
    run.note(What.HEALED, "world", name="kill redis", target="redis")
    run.at += 0.5
    run.receive("c2")
    killed = run.note(What.KILLED, "world", target="c1")
    run.take_back("c1")
    run.at += 1.0
    (receipt,) = run.receive("c2")
    again = next(e for e in run.events if e.receipt == receipt)
    run.settle("c2", receipt, "ack")
    found = check(run.events, run.dump()).figures
    assert found.redelivery["killed"].worst == pytest.approx(again.at - killed.at)
    assert found.recovery.count == 1
    assert found.recovery.worst == pytest.approx(0.501)
    assert (found.tasks, found.deliveries, found.duplicates, found.held) == (1, 2, 1, 1)
    assert found.faults == {"kill redis": 1}


def test_dead_letters_and_states_that_disagree() -> None:
    """R4: a dead task that is not among the dead letters, and a done task that is, are violations."""
    dump = Dump(tasks={"q": {"a": Known("dead"), "b": Known("done")}}, dead_letters={"q": ("b",)})
    run = Simulation()
    run.publish("p", "a", "b")
    violations = check(run.events, dump).violations
    assert {one.task for one in violations if one.rule == "R4"} == {"q/a", "q/b"}

"""The kit finds what is broken: each backend here breaks one promise, and the test that proves it fails."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from hypothesis import Phase, seed, settings

from taskqueue_core.conformance import machine
from taskqueue_core.conformance.capacity import CapacitySuite
from taskqueue_core.conformance.closing import ClosingSuite
from taskqueue_core.conformance.concurrency import ConcurrencySuite
from taskqueue_core.conformance.control import ControlSuite
from taskqueue_core.conformance.dead_letters import DeadLettersSuite
from taskqueue_core.conformance.deliver import DeliverSuite
from taskqueue_core.conformance.entities import EntitiesSuite
from taskqueue_core.conformance.expire import ExpireSuite
from taskqueue_core.conformance.fan_out import FanOutSuite
from taskqueue_core.conformance.floor import FloorSuite
from taskqueue_core.conformance.flow import FlowSuite
from taskqueue_core.conformance.handover import HandoverSuite
from taskqueue_core.conformance.harness import Harness
from taskqueue_core.conformance.inputs import InputsSuite
from taskqueue_core.conformance.ledger import LedgerSuite
from taskqueue_core.conformance.machine import MachineSuite
from taskqueue_core.conformance.moved import MovedSuite
from taskqueue_core.conformance.order import OrderSuite
from taskqueue_core.conformance.processing import ProcessingSuite
from taskqueue_core.conformance.publish import PublishSuite
from taskqueue_core.conformance.rate import RateSuite
from taskqueue_core.conformance.replicas import ReplicasSuite
from taskqueue_core.conformance.retry import RetrySuite
from taskqueue_core.conformance.revocation import RevocationSuite
from taskqueue_core.conformance.room import RoomSuite
from taskqueue_core.conformance.schedule import ScheduleSuite
from taskqueue_core.conformance.settle import SettleSuite
from taskqueue_core.conformance.slots import SlotsSuite
from taskqueue_core.conformance.swap import SwapSuite
from taskqueue_core.conformance.tenants import TenantsSuite
from taskqueue_core.conformance.tracking import TrackingSuite
from taskqueue_core.conformance.waiting import WaitingSuite
from tests.conformance import broken_consumers as consumers
from tests.conformance import broken_flow as flow
from tests.conformance import broken_leases as leases
from tests.conformance import broken_limits as limits
from tests.conformance import broken_order as order
from tests.conformance import broken_slots as slots
from tests.conformance import broken_stores as stores
from tests.conformance.facade import Broken, Facade
from tests.conformance.runner import laws, outcomes, suite_on

CASES: tuple[tuple[Broken, type[Harness], str, str | None], ...] = (
    (consumers.AcceptsStaleReceipts, SettleSuite, "test_receipt_from_before_a_redelivery", "2"),
    (consumers.AdoptsForeignReceipts, HandoverSuite, "test_identity_is_checked", "2"),
    (consumers.BurnsAnAttempt, SettleSuite, "test_waiting_burns_nothing", "3"),
    (consumers.CloseKeepsLeases, ClosingSuite, "test_close_hands_back", "3"),
    (consumers.CountsHandBackAsLoss, SettleSuite, "test_redeliver_is_immediate", "3"),
    (stores.CountsWrong, LedgerSuite, "test_every_arrow", "1"),
    (stores.DeliversEarly, ScheduleSuite, "test_never_early", "8"),
    (consumers.DropsOnRedeliver, SettleSuite, "test_redeliver_is_immediate", "3"),
    (stores.DropsRetries, RetrySuite, "test_never_dropped", "6"),
    (stores.ExpiresTwice, ExpireSuite, "test_reported_by_maintenance", "8"),
    (stores.ForgetsDedupe, PublishSuite, "test_known_after_its_end", "7"),
    (stores.ForgetsTheOtherConnection, ControlSuite, "test_workers", None),
    (consumers.HandsOutTwice, DeliverSuite, "test_one_consumer_each", "2"),
    (stores.IgnoresDeadlines, ExpireSuite, "test_before_and_at", "8"),
    (consumers.InvertedPriority, DeliverSuite, "test_priorities", "4"),
    (consumers.Lifo, DeliverSuite, "test_fifo", "4"),
    (consumers.LosesOnCancel, ConcurrencySuite, "test_waiting_receive_cancelled", "1"),
    (consumers.LosesForOthers, HandoverSuite, "test_former_owner_loses_nothing", "2"),
    (consumers.LosesWakeUps, WaitingSuite, "test_redelivery_wakes", None),
    (consumers.LosesResults, TrackingSuite, "test_results", None),
    (consumers.NeverRevokes, RevocationSuite, "test_cancelled_is_revoked", None),
    (stores.NoHistory, DeadLettersSuite, "test_history", None),
    (stores.Overstating, ReplicasSuite, "test_tasks_survive", "1"),
    (stores.PublishesTwice, PublishSuite, "test_resend_is_a_duplicate", "7"),
    (stores.RedriveLoses, DeadLettersSuite, "test_redrive", "1"),
    (consumers.RefusesResends, SettleSuite, "test_resent_ack", "2"),
    (stores.RetryAsNoOp, RetrySuite, "test_retry_through_core", "8"),
    (consumers.ReturnedLast, SettleSuite, "test_returned_comes_first", "4"),
    (stores.RewritesAnswers, SettleSuite, "test_resent_after_the_end", "2"),
    (stores.SettingsLag, DeadLettersSuite, "test_poison_guard_counts_to_its_setting", "9"),
    (consumers.ShuffledPriority, DeliverSuite, "test_priorities", "4"),
    (consumers.StarvesAKey, DeliverSuite, "test_no_key_starves_one_by_one", "4"),
    (consumers.Unchecked, InputsSuite, "test_limit_of_a_receive", None),
    (stores.UnfencedRetry, RetrySuite, "test_settling_by_a_stale_receipt", "2"),
    (limits.ChangesInSilence, FlowSuite, "test_in_flight_limit_changes", "9"),
    (limits.ChargesTheExpired, RateSuite, "test_expired_take_no_tokens", "5"),
    (limits.CountsRetries, CapacitySuite, "test_retries_take_no_room", "6"),
    (limits.DropsTheSurplus, CapacitySuite, "test_capacity_changes", "6"),
    (limits.FillsAtOnce, RateSuite, "test_refill", "5"),
    (limits.GivesOneTooMany, FlowSuite, "test_in_flight_limit", "5"),
    (limits.HandsOutWhilePaused, FlowSuite, "test_pause", "5"),
    (limits.HidesTheNextToken, RateSuite, "test_burst", "5"),
    (limits.KeepsTheRoom, CapacitySuite, "test_cancelled_make_room", "6"),
    (limits.LimitsEachWorker, FlowSuite, "test_in_flight_limit", "5"),
    (limits.NeverRests, FlowSuite, "test_waiting_for_a_place_costs_nothing", "5"),
    (limits.OneHoldsUpAll, FlowSuite, "test_pause_is_of_one_queue", "5"),
    (limits.RefillsOnChange, RateSuite, "test_changed_limit_keeps_its_tokens", "5"),
    (limits.RefundsTokens, RateSuite, "test_redeliveries_take_tokens", "5"),
    (limits.RefusesDuplicates, CapacitySuite, "test_known_ids_have_their_answer", "6"),
    (limits.RefusesInSilence, CapacitySuite, "test_surplus_is_refused", "6"),
    (limits.RefusesRetries, CapacitySuite, "test_retries_take_no_room", "6"),
    (limits.RefusesTheBatch, CapacitySuite, "test_surplus_is_refused", "6"),
    (limits.SleepsThroughTokens, RateSuite, "test_a_token_wakes", "5"),
    (limits.TakesTheSurplusBack, FlowSuite, "test_lowering_takes_nothing_away", "3"),
    (limits.WakesNobody, FlowSuite, "test_settling_frees_the_place", "5"),
    (limits.WakesNobody, TenantsSuite, "test_a_tenants_place_wakes", "5"),
    (order.ForgetsTenants, OrderSuite, "test_tenants_take_turns", "4"),
    (order.IgnoresWeights, OrderSuite, "test_weights", "4"),
    (order.ReturnedJumps, OrderSuite, "test_returned_jumps_no_tenant", "4"),
    (order.SavesTurns, OrderSuite, "test_tenant_saves_nothing", "4"),
    (order.StartsAnew, OrderSuite, "test_turns_go_on_over_receives", "4"),
    (order.DropsOnSwap, SwapSuite, "test_a_swap_refuses_nothing", "6"),
    (order.SwapsLater, SwapSuite, "test_to_fair", "9"),
    (order.ChargesTenantsForRetries, TenantsSuite, "test_tenant_has_room_again", "6"),
    (order.GivesTenantsOneTooMany, TenantsSuite, "test_tenants_places", "5"),
    (order.RefundsTenants, TenantsSuite, "test_tenants_tokens", "5"),
    (order.TenantHoldsUpAll, TenantsSuite, "test_tenants_places", "5"),
    (order.UnboundedByTenants, TenantsSuite, "test_total_bounds_tenants", "6"),
    (order.ForgetsEntities, EntitiesSuite, "test_one_at_a_time", "4"),
    (order.HoldsForTheDead, EntitiesSuite, "test_death_releases", "4"),
    (order.ReleasesByPriority, EntitiesSuite, "test_order_over_priorities", "4"),
    (order.ReleasesOnHandBack, EntitiesSuite, "test_held_while_returned", "4"),
    (order.ReleasesOnRetry, EntitiesSuite, "test_held_while_retried", "4"),
    (order.OwesTheAbsent, FloorSuite, "test_nothing_is_owed", "4"),
    (order.Starves, FloorSuite, "test_share_of_the_lowest", "4"),
    (consumers.NeverRevokes, ProcessingSuite, "test_worker_is_told", "2"),
    (flow.EndsTheHealthy, ProcessingSuite, "test_progress_prolongs", "3"),
    (flow.HangsForNothing, ProcessingSuite, "test_hung_too_often", "3"),
    (flow.NeverEndsTheHung, ProcessingSuite, "test_hung_comes_back", "3"),
    (limits.RefusesDuplicates, MovedSuite, "test_moved_knows_what_it_had", "7"),
    (flow.MovesRetries, MovedSuite, "test_moved_goes_on", "6"),
    (flow.RaisesHopes, MovedSuite, "test_moved_takes_nothing_new", "6"),
    (flow.CopiesByHalves, FanOutSuite, "test_all_or_nothing", "6"),
    (flow.CopiesCopies, FanOutSuite, "test_no_chains", None),
    (flow.CopiesOnce, FanOutSuite, "test_a_copy_in_each", "1"),
    (flow.KeepsTheOriginal, FanOutSuite, "test_a_copy_in_each", "1"),
    (flow.CancelsInSilence, RoomSuite, "test_room_rings", "6"),
    (flow.MissesRings, RoomSuite, "test_no_ring_is_missed", "6"),
    (flow.RingsAllTheTime, RoomSuite, "test_it_does_not_ring_all_the_time", None),
    (slots.GrantsTwice, SlotsSuite, "test_as_many_as_there_are", None),
    (slots.ChecksThenTakes, SlotsSuite, "test_many_want_the_same_slots", None),
    (slots.ChecksThenTakes, SlotsSuite, "test_a_crowd", None),
    (slots.LosesSlotsOnCancel, SlotsSuite, "test_a_cancelled_acquire_loses_nothing", None),
    (slots.TakesTheBusy, SlotsSuite, "test_idle_slots_are_taken", None),
    (slots.InvertedEndpoints, SlotsSuite, "test_higher_priorities_first", None),
    (slots.ForgetsWhatIsLoaded, SlotsSuite, "test_where_the_model_is_loaded", None),
    (slots.GivesTheDraining, SlotsSuite, "test_drained", None),
    (slots.GivesTheDraining, SlotsSuite, "test_removed", None),
    (slots.GivesTheResting, SlotsSuite, "test_resting", None),
    (slots.IgnoresTogether, SlotsSuite, "test_models_that_share_a_server", None),
    (slots.GivesTheUnseen, SlotsSuite, "test_new_ones_are_looked_at_first", None),
    (slots.GivesTheUnseen, SlotsSuite, "test_no_answer", None),
    (slots.LowersByForce, SlotsSuite, "test_slots_that_are_taken_away", None),
    (slots.KeepsTheUnused, SlotsSuite, "test_drained_with_an_idle_slot", None),
    (slots.KeepsTheUnused, SlotsSuite, "test_removed_with_an_idle_slot", None),
    (slots.KeepsTheUnused, SlotsSuite, "test_rested_with_an_idle_slot", None),
    (slots.KeepsTheUnused, SlotsSuite, "test_silent_with_an_idle_slot", None),
    (slots.KeepsTheUnused, SlotsSuite, "test_several_idle_slots", None),
    (slots.KeepsTheUnused, SlotsSuite, "test_idle_slots_of_a_shared_server_ring", None),
    (slots.EndsTheUsed, SlotsSuite, "test_drained_with_an_idle_slot", None),
    (slots.EndsTheUsed, SlotsSuite, "test_no_answer", None),
    (slots.SplitsNames, SlotsSuite, "test_names_of_any_spelling", None),
    (leases.ReleasesByName, SlotsSuite, "test_a_released_token_is_stale", None),
    (leases.RenewsTheStale, SlotsSuite, "test_a_released_token_is_stale", None),
    (leases.RenewalShortens, SlotsSuite, "test_renewal_shortens_nothing", None),
    (leases.EndsByArithmetic, SlotsSuite, "test_jobs_outlive_their_time", None),
    (leases.LeaksAfterRelease, SlotsSuite, "test_release_gives_back", None),
    (leases.TakeoverForgets, SlotsSuite, "test_a_job_takes_its_slot_over", None),
    (leases.TakeoverLeaks, SlotsSuite, "test_a_job_takes_its_slot_over", None),
    (leases.TakeoverSharesTheSlot, SlotsSuite, "test_a_job_takes_its_slot_over", None),
    (leases.TakeoverSharesTheSlot, SlotsSuite, "test_many_want_the_same_job", None),
    (leases.TakeoverForgetsNotes, SlotsSuite, "test_a_note_outlives_its_holder", None),
    (leases.LosesThePool, SlotsSuite, "test_leases_of_a_lost_pool", None),
    (leases.RemakesAnything, SlotsSuite, "test_what_a_lost_pool_leaves_lost", None),
    (leases.ClearsAtOnce, SlotsSuite, "test_missed_twice", None),
    (leases.IgnoresSpacing, SlotsSuite, "test_missed_twice", None),
    (leases.ForgetsTheContrary, SlotsSuite, "test_the_contrary_between", None),
    (leases.ClearsTheFresh, SlotsSuite, "test_fresh_leases_are_not_cleared", None),
    (leases.ClearsTheFresh, SlotsSuite, "test_a_new_holder_between", None),
    (leases.ClearsTheUnassigned, SlotsSuite, "test_slots_without_a_job_are_not_missed", None),
    (leases.NeverReconciles, SlotsSuite, "test_missed_twice", None),
    (leases.ClearsThoseInTime, SlotsSuite, "test_those_in_time_are_not_missed", None),
    (leases.LateNotesOverwrite, SlotsSuite, "test_a_note_that_comes_late", None),
    (leases.HoardsLateNotes, SlotsSuite, "test_late_notes_are_bounded", None),
    (leases.NeverRingsForSlots, SlotsSuite, "test_a_released_slot_rings", None),
    (leases.NeverRingsForSlots, SlotsSuite, "test_a_note_rings", None),
    (leases.ShowsTokens, SlotsSuite, "test_states_of_a_lease", None),
)

FOUND_BY_HISTORIES = (
    consumers.AcceptsStaleReceipts,
    consumers.BurnsAnAttempt,
    consumers.CountsHandBackAsLoss,
    stores.CountsWrong,
    stores.DeliversEarly,
    consumers.DropsOnRedeliver,
    stores.ForgetsDedupe,
    stores.IgnoresDeadlines,
    consumers.Lifo,
    stores.RetryAsNoOp,
    stores.UnfencedRetry,
    limits.GivesOneTooMany,
    limits.HandsOutWhilePaused,
    order.ForgetsEntities,
    order.ForgetsTenants,
    order.HoldsForTheDead,
    order.ReleasesOnHandBack,
    order.ReleasesOnRetry,
    flow.EndsTheHealthy,
    flow.HangsForNothing,
    flow.NeverEndsTheHung,
)

FOUND_BY_HISTORIES_OF_SLOTS = (
    slots.GrantsTwice,
    slots.ForgetsWhatIsLoaded,
    slots.GivesTheResting,
    slots.IgnoresTogether,
    slots.KeepsTheUnused,
    leases.RenewalShortens,
    leases.TakeoverLeaks,
    leases.LosesThePool,
    leases.IgnoresSpacing,
    leases.ClearsTheFresh,
    leases.LateNotesOverwrite,
)


@pytest.fixture
def profile() -> Callable[..., AbstractContextManager[None]]:
    """Run Hypothesis with settings of one's own, and the same examples in every run."""

    @contextmanager
    def chosen(**options: Any) -> Iterator[None]:
        before = settings.get_current_profile_name()
        settings.register_profile("kit", derandomize=True, database=None, **options)
        settings.load_profile("kit")
        try:
            yield
        finally:
            settings.load_profile(before)

    return chosen


@pytest.mark.parametrize(
    ("backend", "suite", "proof", "law"),
    CASES,
    ids=[f"{case[0].__name__}-{case[2]}" for case in CASES],
)
def test_broken_backend_fails(
    backend: Broken, suite: type[Harness], proof: str, law: str | None
) -> None:
    """A backend that breaks a promise fails the test of this promise, which names the law."""
    kit = suite_on(backend, suite, patience=0.05)
    assert outcomes(kit, proof)[proof] == "failed"
    assert law is None or law in laws(kit, proof)


@pytest.mark.parametrize("suite", dict.fromkeys(case[1] for case in CASES))
def test_whole_backend_passes(suite: type[Harness]) -> None:
    """The same tests pass on the same backend with nothing broken: they fail for what was broken."""
    assert "failed" not in outcomes(suite_on(Facade, suite)).values()


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(one, marks=pytest.mark.long if one is limits.HandsOutWhilePaused else ())
        for one in FOUND_BY_HISTORIES  # that one takes several seconds
    ],
)
def test_random_histories_find_it(
    backend: Broken,
    profile: Callable[..., AbstractContextManager[None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The state machine alone finds what is broken, in one of a few series of histories."""

    def play() -> None:
        for number in range(4):  # the histories of one series resemble each other
            seeded = seed(number)(type("Seeded", (machine.QueueMachine,), {}))
            monkeypatch.setattr(machine, "QueueMachine", seeded)
            suite_on(backend, MachineSuite).test_machine()

    with (
        profile(phases=[Phase.generate]),
        pytest.raises(AssertionError, match=r"law|changed on the way|not delivered|due_at"),
    ):
        play()


@pytest.mark.parametrize("backend", FOUND_BY_HISTORIES_OF_SLOTS)
def test_random_histories_of_slots_find_it(
    backend: Broken, profile: Callable[..., AbstractContextManager[None]]
) -> None:
    """The state machine of slots alone finds what is broken (B6, B8, C22; OPEN-C4)."""
    with profile(phases=[Phase.generate]), pytest.raises(AssertionError):
        suite_on(backend, SlotsSuite).test_slot_machine()


def test_history_is_readable(profile: Callable[..., AbstractContextManager[None]]) -> None:
    """A failure shows its history, a call a line, with the answers and what is wrong."""
    with profile(phases=[Phase.generate]), pytest.raises(AssertionError) as failure:
        suite_on(consumers.CountsHandBackAsLoss, MachineSuite).test_machine()
    assert re.search(r"(alpha|beta)/t\d .*\(law \d\)", str(failure.value))
    history = "\n".join(failure.value.__notes__)
    assert re.search(r"\n# 1000000\d+\.\d+: .+\n(.+ = )?state\.\w+\(.*\)\n", history)
    assert "state.teardown()" in history

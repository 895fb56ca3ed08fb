"""The conformance kit finds defects: each backend here breaks one promise, and the test of this promise fails."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from hypothesis import Phase, seed, settings

from taskqueue_conformance import BackendSuite
from taskqueue_conformance.model import machine
from taskqueue_conformance.model.machine import MachineSuite
from taskqueue_conformance.suite import SlotsSuite
from tests.conformance import broken_audit as audit
from tests.conformance import broken_consumers as consumers
from tests.conformance import broken_dependencies as dependencies
from tests.conformance import broken_digest as digests
from tests.conformance import broken_flow as flow
from tests.conformance import broken_leases as leases
from tests.conformance import broken_limits as limits
from tests.conformance import broken_listing as listing
from tests.conformance import broken_order as order
from tests.conformance import broken_replace as replacing
from tests.conformance import broken_schedules as schedules
from tests.conformance import broken_slots as slots
from tests.conformance import broken_stores as stores
from tests.conformance import broken_streams as streams
from tests.conformance import broken_unique as unique
from tests.conformance.facade import Broken, Facade
from tests.conformance.runner import laws, outcomes, suite_on

CASES: tuple[tuple[Broken, str, str | None], ...] = (
    (consumers.AcceptsStaleReceipts, "test_receipt_from_before_a_redelivery", "2"),
    (consumers.AdoptsForeignReceipts, "test_identity_is_checked", "2"),
    (consumers.BurnsAnAttempt, "test_waiting_burns_nothing", "3"),
    (consumers.CloseKeepsLeases, "test_close_releases", "3"),
    (consumers.CountsHandBackAsLoss, "test_redeliver_is_immediate", "3"),
    (dependencies.DoesNotWait, "test_until_its_parent_is_done", "1"),
    (dependencies.LosesLines, "test_lines_are_read_by_pages", None),
    (dependencies.ForgetsEnds, "test_repeated_registrations", None),
    (dependencies.IgnoresVersions, "test_reports_in_a_wrong_order", None),
    (dependencies.IgnoresEntries, "test_an_id_that_is_used_again", None),
    (dependencies.ReportsToTheNext, "test_a_parent_that_runs_again", None),
    (dependencies.ShowsAllParents, "test_what_a_task_waits_for", None),
    (dependencies.CountsTheReleased, "test_blocked_on_dead", None),
    (dependencies.CountsDeadParents, "test_blocked_on_dead", None),
    (dependencies.LosesInputs, "test_results_are_inputs", None),
    (dependencies.MixesInputs, "test_results_are_inputs", None),
    (dependencies.ForgetsOldResults, "test_a_parent_that_was_done_before", None),
    (dependencies.LeavesLargeInputsOut, "test_inputs_that_are_too_large", None),
    (dependencies.ForgetsHolders, "test_dead_letters_of_another_backend", None),
    (dependencies.SealsNothing, "test_members_that_come_late", "7"),
    (dependencies.CountsTheDead, "test_a_dead_member_holds", None),
    (dependencies.EndsWithTheFirstCount, "test_counts_that_are_repeated_and_late", None),
    (dependencies.TakesOldCounts, "test_counts_that_are_repeated_and_late", None),
    (stores.CountsWrong, "test_every_arrow", "1"),
    (stores.DeliversEarly, "test_never_early", "8"),
    (consumers.DropsOnRedeliver, "test_redeliver_is_immediate", "3"),
    (stores.DropsRetries, "test_never_dropped", "6"),
    (stores.ExpiresTwice, "test_reported_by_maintenance", "8"),
    (stores.ForgetsDedupe, "test_known_after_its_end", "7"),
    (stores.ForgetsTheOtherConnection, "test_workers", None),
    (flow.ForgetsTheTimeout, "test_timeout_comes_with_each_delivery", "9"),
    (consumers.HandsOutTwice, "test_one_consumer_each", "2"),
    (stores.IgnoresDeadlines, "test_before_and_at", "8"),
    (consumers.InvertedPriority, "test_priorities", "4"),
    (consumers.Lifo, "test_fifo", "4"),
    (consumers.LosesOnCancel, "test_waiting_receive_cancelled", "1"),
    (consumers.LosesForOthers, "test_former_owner_loses_nothing", "2"),
    (consumers.LosesWakeUps, "test_redelivery_wakes", None),
    (consumers.LosesResults, "test_results", None),
    (consumers.NeverRevokes, "test_cancelled_is_revoked", None),
    (stores.NoHistory, "test_history", None),
    (stores.Overstating, "test_tasks_survive", "1"),
    (stores.PublishesTwice, "test_resend_is_a_duplicate", "7"),
    (stores.PurgesTooMuch, "test_purge_is_exact", "1"),
    (stores.RedriveLoses, "test_redrive", "1"),
    (consumers.RefusesResends, "test_resent_ack", "2"),
    (audit.ListsOldestFirst, "test_entries", None),
    (audit.CountsPages, "test_pages_of_entries", None),
    (audit.LosesDetails, "test_entries", None),
    (audit.HasNoTime, "test_entries", None),
    (schedules.FiresTwice, "test_fired_once", None),
    (schedules.FiresOldPlans, "test_plan_of_an_old_version", None),
    (schedules.MovesOnWhenRefused, "test_full_queue", "6"),
    (schedules.ForgetsTheRefused, "test_queue_becomes_full", "6"),
    (schedules.ForgetsWhyRefused, "test_last_refusal", "6"),
    (schedules.HidesOthers, "test_plan_without_effect", None),
    (schedules.TurnsBack, "test_a_change_keeps_the_next_time", None),
    (schedules.KeepsQuiet, "test_signal_of_schedules", None),
    (schedules.ReplacesAnyVersion, "test_versions_of_schedules", None),
    (stores.RetryAsNoOp, "test_retry_through_core", "8"),
    (consumers.ReturnedLast, "test_returned_comes_first", "4"),
    (stores.RewritesAnswers, "test_resent_after_the_end", "2"),
    (stores.StopsHalfWay, "test_maintain_keeps_up", "10"),
    (stores.SettingsLag, "test_poison_guard_counts_to_its_setting", "9"),
    (consumers.ShuffledPriority, "test_priorities", "4"),
    (consumers.StarvesAKey, "test_no_key_starves_one_by_one", "4"),
    (consumers.Unchecked, "test_limit_of_a_receive", None),
    (stores.ReschedulesReleased, "test_what_cannot_be_rescheduled", "3"),
    (stores.CountsSnoozes, "test_free_retry", "3"),
    (stores.UnfencedRetry, "test_settling_by_a_stale_receipt", "2"),
    (listing.ForgetsTheTask, "test_list_of_waiting_tasks", "11"),
    (listing.CountsByNumber, "test_a_walk_while_tasks_leave", "11"),
    (listing.SharesCursors, "test_cursor_of_another_query", None),
    (listing.IgnoresTheTenant, "test_list_of_a_tenant", "11"),
    (listing.NewestIsTheSame, "test_list_of_scheduled_tasks", "11"),
    (listing.IgnoresSince, "test_ended_tasks_by_time", "11"),
    (listing.IncludesUntil, "test_scheduled_tasks_by_time", "11"),
    (listing.SearchesFromTheFront, "test_scheduled_tasks_by_time", None),
    (listing.ForgetsWhoFailed, "test_dead_letters_by_time_and_worker", None),
    (listing.ShowsThePublishAsDelivery, "test_what_a_worker_ran_at_a_time", None),
    (listing.SearchesWithoutIndex, "test_tags_that_the_queue_does_not_index", None),
    (listing.KeepsTooMany, "test_the_oldest_kept_tasks_go", None),
    (listing.KnowsKeptIds, "test_kept_tasks", "7"),
    (listing.MixesEnds, "test_list_of_each_end", None),
    (listing.KeepsErasedRecords, "test_erasure_of_a_tag", "11"),
    (limits.ChangesInSilence, "test_in_flight_limit_changes", "9"),
    (limits.ChargesTheExpired, "test_expired_take_no_tokens", "5"),
    (limits.CountsRetries, "test_retries_take_no_room", "6"),
    (limits.DropsTheSurplus, "test_capacity_changes", "6"),
    (limits.FillsAtOnce, "test_refill", "5"),
    (limits.GivesOneTooMany, "test_in_flight_limit", "5"),
    (limits.HandsOutWhilePaused, "test_pause", "5"),
    (limits.HidesTheNextToken, "test_burst", "5"),
    (limits.KeepsTheRoom, "test_cancelled_make_room", "6"),
    (limits.LimitsEachWorker, "test_in_flight_limit", "5"),
    (limits.NeverRests, "test_waiting_for_a_place_costs_nothing", "5"),
    (limits.OneHoldsUpAll, "test_pause_is_of_one_queue", "5"),
    (limits.RefillsOnChange, "test_changed_limit_keeps_its_tokens", "5"),
    (limits.RefundsTokens, "test_redeliveries_take_tokens", "5"),
    (limits.RefusesDuplicates, "test_known_ids_have_their_answer", "6"),
    (limits.RefusesInSilence, "test_surplus_is_refused", "6"),
    (limits.RefusesRetries, "test_retries_take_no_room", "6"),
    (limits.RefusesTheBatch, "test_surplus_is_refused", "6"),
    (limits.SleepsThroughTokens, "test_a_token_wakes", "5"),
    (limits.TakesTheSurplusBack, "test_lowering_takes_nothing_away", "3"),
    (limits.WakesNobody, "test_settling_frees_the_place", "5"),
    (limits.WakesNobody, "test_a_tenants_place_wakes", "5"),
    (order.ForgetsTenants, "test_tenants_take_turns", "4"),
    (order.IgnoresWeights, "test_weights", "4"),
    (order.IgnoresPausedTenants, "test_paused_tenant", "5"),
    (order.ReturnedJumps, "test_returned_jumps_no_tenant", "4"),
    (order.SavesTurns, "test_tenant_saves_nothing", "4"),
    (order.StartsAnew, "test_turns_go_on_over_receives", "4"),
    (order.DropsOnSwap, "test_a_swap_refuses_nothing", "6"),
    (order.SwapsLater, "test_to_fair", "9"),
    (order.ChargesTenantsForRetries, "test_tenant_has_room_again", "6"),
    (order.GivesTenantsOneTooMany, "test_tenants_places", "5"),
    (order.RefundsTenants, "test_tenants_tokens", "5"),
    (order.TenantHoldsUpAll, "test_tenants_places", "5"),
    (order.UnboundedByTenants, "test_total_bounds_tenants", "6"),
    (order.ForgetsEntities, "test_one_at_a_time", "4"),
    (order.HoldsForTheDead, "test_death_releases", "4"),
    (order.ReleasesByPriority, "test_order_over_priorities", "4"),
    (order.ReleasesOnHandBack, "test_held_while_returned", "4"),
    (order.ReleasesOnRetry, "test_held_while_retried", "4"),
    (order.OwesTheAbsent, "test_nothing_is_owed", "4"),
    (order.Starves, "test_share_of_the_lowest", "4"),
    (order.ServesTheLowest, "test_share_of_each", "4"),
    (consumers.NeverRevokes, "test_worker_is_notified", "2"),
    (flow.EndsTheHealthy, "test_progress_prolongs", "3"),
    (flow.HangsForNothing, "test_hung_too_often", "3"),
    (flow.NeverEndsTheHung, "test_hung_comes_back", "3"),
    (limits.RefusesDuplicates, "test_moved_knows_what_it_had", "7"),
    (flow.MovesRetries, "test_moved_goes_on", "6"),
    (flow.RaisesHopes, "test_moved_takes_nothing_new", "6"),
    (flow.CopiesByHalves, "test_all_or_nothing", "6"),
    (flow.CopiesCopies, "test_no_chains", None),
    (flow.CopiesOnce, "test_a_copy_in_each", "1"),
    (flow.KeepsTheOriginal, "test_a_copy_in_each", "1"),
    (flow.CancelsInSilence, "test_room_notifies", "6"),
    (flow.MissesRings, "test_no_notification_is_missed", "6"),
    (flow.RingsAllTheTime, "test_it_does_not_fire_all_the_time", None),
    (slots.GrantsTwice, "test_as_many_as_there_are", None),
    (slots.ChecksThenTakes, "test_many_want_the_same_slots", None),
    (slots.ChecksThenTakes, "test_a_crowd", None),
    (slots.LosesSlotsOnCancel, "test_a_cancelled_acquire_loses_nothing", None),
    (slots.TakesTheBusy, "test_idle_slots_are_taken", None),
    (slots.InvertedEndpoints, "test_higher_priorities_first", None),
    (slots.ForgetsWhatIsLoaded, "test_where_the_model_is_loaded", None),
    (slots.GivesTheDraining, "test_drained", None),
    (slots.GivesTheDraining, "test_removed", None),
    (slots.GivesTheResting, "test_resting", None),
    (slots.IgnoresTogether, "test_models_that_share_a_server", None),
    (slots.GivesTheUnseen, "test_new_ones_are_looked_at_first", None),
    (slots.GivesTheUnseen, "test_no_answer", None),
    (slots.LowersByForce, "test_slots_that_are_taken_away", None),
    (slots.KeepsTheUnused, "test_drained_with_an_idle_slot", None),
    (slots.KeepsTheUnused, "test_removed_with_an_idle_slot", None),
    (slots.KeepsTheUnused, "test_rested_with_an_idle_slot", None),
    (slots.KeepsTheUnused, "test_silent_with_an_idle_slot", None),
    (slots.KeepsTheUnused, "test_several_idle_slots", None),
    (slots.KeepsTheUnused, "test_idle_slots_of_a_shared_server_fire", None),
    (slots.EndsTheUsed, "test_drained_with_an_idle_slot", None),
    (slots.EndsTheUsed, "test_no_answer", None),
    (slots.SplitsNames, "test_names_of_any_spelling", None),
    (leases.ReleasesByName, "test_a_released_token_is_stale", None),
    (leases.RenewsTheStale, "test_a_released_token_is_stale", None),
    (leases.RenewalShortens, "test_renewal_shortens_nothing", None),
    (leases.EndsByArithmetic, "test_jobs_outlive_their_time", None),
    (leases.LeaksAfterRelease, "test_release_gives_back", None),
    (leases.TakeoverForgets, "test_a_job_takes_its_slot_over", None),
    (leases.TakeoverLeaks, "test_a_job_takes_its_slot_over", None),
    (leases.TakeoverSharesTheSlot, "test_a_job_takes_its_slot_over", None),
    (leases.TakeoverSharesTheSlot, "test_many_want_the_same_job", None),
    (leases.TakeoverForgetsNotes, "test_a_note_outlives_its_holder", None),
    (leases.LosesThePool, "test_leases_of_a_lost_pool", None),
    (leases.RemakesAnything, "test_what_a_lost_pool_leaves_lost", None),
    (leases.ClearsAtOnce, "test_missed_twice", None),
    (leases.IgnoresSpacing, "test_missed_twice", None),
    (leases.ForgetsTheContrary, "test_the_contrary_between", None),
    (leases.ClearsTheFresh, "test_fresh_leases_are_not_cleared", None),
    (leases.ClearsTheFresh, "test_a_new_holder_between", None),
    (leases.ClearsTheUnassigned, "test_slots_without_a_job_are_not_missed", None),
    (leases.NeverReconciles, "test_missed_twice", None),
    (leases.ClearsThoseInTime, "test_those_in_time_are_not_missed", None),
    (leases.LateNotesOverwrite, "test_a_note_that_comes_late", None),
    (leases.HoardsLateNotes, "test_late_notes_are_bounded", None),
    (leases.NeverRingsForSlots, "test_a_released_slot_notifies", None),
    (leases.NeverRingsForSlots, "test_a_note_notifies", None),
    (leases.ShowsTokens, "test_states_of_a_lease", None),
    *unique.CASES,
    *replacing.CASES,
    *digests.CASES,
    *streams.CASES,
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
    stores.CountsSnoozes,
    stores.UnfencedRetry,
    limits.GivesOneTooMany,
    limits.HandsOutWhilePaused,
    order.ForgetsEntities,
    order.ForgetsTenants,
)

FOUND_LATE = (consumers.AcceptsStaleReceipts, stores.IgnoresDeadlines, limits.HandsOutWhilePaused)
"""those of `FOUND_BY_HISTORIES` for which random histories need several seconds"""

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
    """Return a context manager that runs Hypothesis with these settings and the same examples in every run."""

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
    ("backend", "proof", "law"), CASES, ids=[f"{case[0].__name__}-{case[1]}" for case in CASES]
)
def test_broken_backend_fails(backend: Broken, proof: str, law: str | None) -> None:
    """A backend that breaks a promise fails the test of this promise, whose docstring names the law."""
    kit = suite_on(backend, BackendSuite, patience=0.05)
    assert outcomes(kit, proof)[proof] == "failed"
    assert law is None or law in laws(kit, proof)


def test_whole_backend_passes() -> None:
    """The facade without a defect passes all tests, so that a broken backend fails because of its defect only."""
    assert set(outcomes(suite_on(Facade, BackendSuite)).values()) == {"passed"}


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(one, marks=pytest.mark.long if one in FOUND_LATE else ())
        for one in FOUND_BY_HISTORIES
    ],
)
def test_random_histories_find_it(
    backend: Broken,
    profile: Callable[..., AbstractContextManager[None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Random histories of the state machine find each of these defects within eight series."""

    def play() -> None:
        for number in range(8):  # because the histories of one series resemble each other
            seeded = seed(number)(type("Seeded", (machine.QueueMachine,), {}))
            monkeypatch.setattr(machine, "QueueMachine", seeded)
            suite_on(backend, MachineSuite).test_machine()

    with (
        profile(phases=[Phase.generate]),
        pytest.raises(AssertionError, match=r"law|as it was published|not delivered|due_at"),
    ):
        play()


@pytest.mark.parametrize("backend", FOUND_BY_HISTORIES_OF_SLOTS)
def test_random_histories_of_slots_find_it(
    backend: Broken, profile: Callable[..., AbstractContextManager[None]]
) -> None:
    """Random histories of the slot state machine find each of these defects (B6, B8, C22; OPEN-C4)."""
    suite = suite_on(backend, SlotsSuite)
    suite.max_examples = 500
    with profile(phases=[Phase.generate]), pytest.raises(AssertionError):
        suite.test_slot_machine()


def test_history_is_readable(profile: Callable[..., AbstractContextManager[None]]) -> None:
    """A failure prints its history: one line per call, with the answers and the violated law."""
    with profile(phases=[Phase.generate]), pytest.raises(AssertionError) as failure:
        suite_on(consumers.CountsHandBackAsLoss, MachineSuite).test_machine()
    assert re.search(r"(alpha|beta)/t\d\b.*\(law \d\)", str(failure.value))
    history = "\n".join(failure.value.__notes__)
    assert re.search(r"\n# 1000000\d+\.\d+: .+\n(.+ = )?state\.\w+\(.*\)\n", history)
    assert "state.teardown()" in history

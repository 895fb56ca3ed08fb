"""The suites of the kit, combined into one base class."""

from __future__ import annotations

from taskqueue_conformance.declared import DeclaredSuite
from taskqueue_conformance.model.machine import MachineSuite
from taskqueue_conformance.slots.endpoints import SlotServersSuite
from taskqueue_conformance.slots.leases import SlotLeasesSuite
from taskqueue_conformance.slots.machine import SlotsMachineSuite
from taskqueue_conformance.slots.notifications import SlotSignalsSuite
from taskqueue_conformance.slots.reconcile import SlotReconcileSuite
from taskqueue_conformance.slots.unused import SlotUnusedSuite
from taskqueue_conformance.suites.audit import AuditSuite
from taskqueue_conformance.suites.batches import BatchesSuite
from taskqueue_conformance.suites.blocked import BlockedSuite
from taskqueue_conformance.suites.blocked_lines import BlockedLinesSuite
from taskqueue_conformance.suites.blocked_views import BlockedViewsSuite
from taskqueue_conformance.suites.boundaries import BoundariesSuite
from taskqueue_conformance.suites.capacity import CapacitySuite
from taskqueue_conformance.suites.close import ClosingSuite
from taskqueue_conformance.suites.concurrency import ConcurrencySuite
from taskqueue_conformance.suites.content_digest import ContentDigestSuite
from taskqueue_conformance.suites.control import ControlSuite
from taskqueue_conformance.suites.costs import CostsSuite
from taskqueue_conformance.suites.dead_letters import DeadLettersSuite
from taskqueue_conformance.suites.deliver import DeliverSuite
from taskqueue_conformance.suites.expire import ExpireSuite
from taskqueue_conformance.suites.fan_out import FanOutSuite
from taskqueue_conformance.suites.faults import FaultsSuite
from taskqueue_conformance.suites.floor_share import FloorSuite
from taskqueue_conformance.suites.flow import FlowSuite
from taskqueue_conformance.suites.handover import HandoverSuite
from taskqueue_conformance.suites.inputs import InputsSuite
from taskqueue_conformance.suites.ledger import LedgerSuite
from taskqueue_conformance.suites.listing import ListingSuite
from taskqueue_conformance.suites.listing_ended import ListingEndedSuite
from taskqueue_conformance.suites.listing_tags import ListingTagsSuite, TagSuite
from taskqueue_conformance.suites.listing_times import ListingTimesSuite
from taskqueue_conformance.suites.moved import MovedSuite
from taskqueue_conformance.suites.order import OrderSuite
from taskqueue_conformance.suites.order_change import SwapSuite
from taskqueue_conformance.suites.ordering_keys import EntitiesSuite
from taskqueue_conformance.suites.processes import ProcessesSuite
from taskqueue_conformance.suites.processing import ProcessingSuite
from taskqueue_conformance.suites.publish import PublishSuite
from taskqueue_conformance.suites.rate import RateSuite
from taskqueue_conformance.suites.replicas import ReplicasSuite
from taskqueue_conformance.suites.retry import RetrySuite
from taskqueue_conformance.suites.revocation import RevocationSuite
from taskqueue_conformance.suites.room_signal import RoomSuite
from taskqueue_conformance.suites.schedule import ScheduleSuite
from taskqueue_conformance.suites.schedule_fires import ScheduleFiresSuite
from taskqueue_conformance.suites.schedules_kept import SchedulesKeptSuite
from taskqueue_conformance.suites.settle import SettleSuite
from taskqueue_conformance.suites.streams import StreamsSuite
from taskqueue_conformance.suites.tenants import TenantsSuite
from taskqueue_conformance.suites.tracking import TrackingSuite
from taskqueue_conformance.suites.unique import UniqueSuite
from taskqueue_conformance.suites.unique_replace import UniqueReplaceSuite
from taskqueue_conformance.suites.waiting import WaitingSuite


class SlotsSuite(
    SlotsMachineSuite,
    SlotUnusedSuite,
    SlotSignalsSuite,
    SlotReconcileSuite,
    SlotServersSuite,
    SlotLeasesSuite,
):
    """All tests of the capability ``slots`` (`taskqueue_core.capabilities.SlotPool`)."""


class BackendSuite(
    MachineSuite,
    ProcessesSuite,
    FaultsSuite,
    CostsSuite,
    AuditSuite,
    BatchesSuite,
    BlockedSuite,
    BlockedLinesSuite,
    BlockedViewsSuite,
    BoundariesSuite,
    ReplicasSuite,
    ConcurrencySuite,
    LedgerSuite,
    SlotsSuite,
    OrderSuite,
    SwapSuite,
    TenantsSuite,
    EntitiesSuite,
    FloorSuite,
    FanOutSuite,
    CapacitySuite,
    RoomSuite,
    FlowSuite,
    RateSuite,
    ProcessingSuite,
    MovedSuite,
    ListingSuite,
    ListingTagsSuite,
    ListingEndedSuite,
    ListingTimesSuite,
    TagSuite,
    TrackingSuite,
    ControlSuite,
    RevocationSuite,
    HandoverSuite,
    DeadLettersSuite,
    ExpireSuite,
    RetrySuite,
    ScheduleFiresSuite,
    SchedulesKeptSuite,
    ScheduleSuite,
    StreamsSuite,
    WaitingSuite,
    ClosingSuite,
    SettleSuite,
    DeliverSuite,
    UniqueSuite,
    UniqueReplaceSuite,
    ContentDigestSuite,
    PublishSuite,
    InputsSuite,
    DeclaredSuite,
):
    """Tests of the contract and of all capabilities that the class declares. The backend must declare the same ones.

    ::

        class TestMyBackend(BackendSuite):
            capabilities = Capabilities(names=frozenset({Capability.CONTROL}))

            async def open_backend(self, clock: ManualClock) -> Backend:
                return MyBackend(clock=clock)
    """

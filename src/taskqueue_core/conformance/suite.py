"""The whole kit as one base class."""

from __future__ import annotations

from taskqueue_core.conformance.capacity import CapacitySuite
from taskqueue_core.conformance.closing import ClosingSuite
from taskqueue_core.conformance.concurrency import ConcurrencySuite
from taskqueue_core.conformance.control import ControlSuite
from taskqueue_core.conformance.dead_letters import DeadLettersSuite
from taskqueue_core.conformance.declared import DeclaredSuite
from taskqueue_core.conformance.deliver import DeliverSuite
from taskqueue_core.conformance.entities import EntitiesSuite
from taskqueue_core.conformance.expire import ExpireSuite
from taskqueue_core.conformance.fan_out import FanOutSuite
from taskqueue_core.conformance.floor import FloorSuite
from taskqueue_core.conformance.flow import FlowSuite
from taskqueue_core.conformance.handover import HandoverSuite
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

__all__ = ["BackendSuite"]


class BackendSuite(
    MachineSuite,
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
    TrackingSuite,
    ControlSuite,
    RevocationSuite,
    HandoverSuite,
    DeadLettersSuite,
    ExpireSuite,
    RetrySuite,
    ScheduleSuite,
    WaitingSuite,
    ClosingSuite,
    SettleSuite,
    DeliverSuite,
    PublishSuite,
    InputsSuite,
    DeclaredSuite,
):
    """Every promise of the contract and of the capabilities that the class declares, as its backend must.

    ::

        class TestMyBackend(BackendSuite):
            capabilities = Capabilities(names=frozenset({Capability.CONTROL}))

            async def open_backend(self, clock: ManualClock) -> Backend:
                return MyBackend(clock=clock)
    """

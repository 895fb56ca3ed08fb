"""The capability ``slots``, whole."""

from __future__ import annotations

from taskqueue_core.conformance.slot_bells import SlotBellsSuite
from taskqueue_core.conformance.slot_leases import SlotLeasesSuite
from taskqueue_core.conformance.slot_reconcile import SlotReconcileSuite
from taskqueue_core.conformance.slot_servers import SlotServersSuite
from taskqueue_core.conformance.slot_unused import SlotUnusedSuite
from taskqueue_core.conformance.slots_machine import SlotsMachineSuite

__all__ = ["SlotsSuite"]


class SlotsSuite(
    SlotsMachineSuite,
    SlotUnusedSuite,
    SlotBellsSuite,
    SlotReconcileSuite,
    SlotServersSuite,
    SlotLeasesSuite,
):
    """`taskqueue_core.capabilities.SlotPool`."""

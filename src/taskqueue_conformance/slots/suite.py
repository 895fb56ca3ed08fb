"""The capability ``slots``, whole."""

from __future__ import annotations

from taskqueue_conformance.slots.endpoints import SlotServersSuite
from taskqueue_conformance.slots.leases import SlotLeasesSuite
from taskqueue_conformance.slots.machine import SlotsMachineSuite
from taskqueue_conformance.slots.notifications import SlotBellsSuite
from taskqueue_conformance.slots.reconcile import SlotReconcileSuite
from taskqueue_conformance.slots.unused import SlotUnusedSuite

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

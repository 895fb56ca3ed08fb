"""The pytest plugin: failures of the kit show their values, and ``-m conformance`` selects its tests."""

from __future__ import annotations

import pytest

__all__ = ["pytest_collection_modifyitems", "pytest_configure"]

MODULES = (
    "bench",
    "capacity",
    "closing",
    "concurrency",
    "control",
    "dead_letters",
    "deliver",
    "draws",
    "ends",
    "entities",
    "entries",
    "expire",
    "fan_out",
    "floor",
    "flow",
    "handover",
    "harness",
    "inputs",
    "ledger",
    "limits",
    "machine",
    "model",
    "moved",
    "moves",
    "order",
    "processing",
    "publish",
    "rate",
    "replicas",
    "retry",
    "revocation",
    "room",
    "schedule",
    "settle",
    "shelf",
    "slot_bells",
    "slot_leases",
    "slot_model",
    "slot_moves",
    "slot_reconcile",
    "slot_servers",
    "slot_unused",
    "slots",
    "slots_machine",
    "swap",
    "tenants",
    "tracking",
    "turns",
    "waiting",
)
"""the modules of the kit that hold assertions"""

pytest.register_assert_rewrite(*(f"taskqueue_core.conformance.{module}" for module in MODULES))


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers", "conformance: proves a backend's promise (taskqueue_core.conformance)"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the kit's tests."""
    for item in items:
        if getattr(getattr(item, "cls", None), "__taskqueue_conformance__", False):
            item.add_marker("conformance")

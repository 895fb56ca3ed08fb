"""The pytest plugin of the kit: only tests that apply to a backend are collected, and a run says what was left out.

Failures show their values, and ``-m conformance`` selects the kit's tests.
"""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from typing import Any

import pytest

MODULES = (
    "bench",
    "declared",
    "harness",
    "model.draws",
    "model.ends",
    "model.entries",
    "model.limits",
    "model.machine",
    "model.model",
    "model.moves",
    "model.shelf",
    "model.turns",
    "slots.endpoints",
    "slots.helpers",
    "slots.leases",
    "slots.machine",
    "slots.model",
    "slots.notifications",
    "slots.reconcile",
    "slots.unused",
    "suites.capacity",
    "suites.close",
    "suites.concurrency",
    "suites.control",
    "suites.dead_letters",
    "suites.deliver",
    "suites.expire",
    "suites.fan_out",
    "suites.floor_share",
    "suites.flow",
    "suites.handover",
    "suites.inputs",
    "suites.ledger",
    "suites.moved",
    "suites.order",
    "suites.order_change",
    "suites.ordering_keys",
    "suites.processing",
    "suites.publish",
    "suites.rate",
    "suites.replicas",
    "suites.retry",
    "suites.revocation",
    "suites.room_signal",
    "suites.schedule",
    "suites.settle",
    "suites.tenants",
    "suites.tracking",
    "suites.waiting",
)
"""the modules of the kit that hold assertions"""

pytest.register_assert_rewrite(*(f"taskqueue_conformance.{module}" for module in MODULES))


_KIT = "taskqueue_conformance"
_counted = pytest.StashKey[dict[str, Counter[str]]]()
"""for each class, by its node id: how many tests apply (under ``""``), and how many lack what"""
_lines = pytest.StashKey[list[str]]()
"""what the summary says"""


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers", "conformance: proves a backend's promise (taskqueue_conformance)"
    )
    config.stash[_counted] = {}
    config.stash[_lines] = []


def pytest_pycollect_makeitem(
    collector: pytest.Module | pytest.Class, name: str, obj: object
) -> list[pytest.Item] | None:
    """Leave out a test that needs what its class does not declare."""
    if not (_of_the_kit(collector.obj) and collector.funcnamefilter(name)):
        return None
    selection = import_module("taskqueue_conformance.selection")
    lacking = selection.missing(collector.obj, obj)
    counts = collector.config.stash[_counted].setdefault(collector.nodeid, Counter())
    counts["" if lacking is None else str(lacking)] += 1
    return None if lacking is None else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the kit's tests."""
    for item in items:
        if _of_the_kit(getattr(item, "cls", None)):
            item.add_marker("conformance")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Put into words what was left out of the classes that are run."""
    run = {item.parent.nodeid for item in session.items if item.parent}
    for name, counts in session.config.stash[_counted].items():
        if name in run:
            session.config.stash[_lines].append(_line(name, counts))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand what a process of pytest-xdist found to the one that prints."""
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[_KIT] = session.config.stash[_lines]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take what a process of pytest-xdist found: each of them collects all tests."""
    result = getattr(node, "workeroutput", {}).get(_KIT, [])
    node.config.stash[_lines] = result or node.config.stash[_lines]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many tests of the kit do not apply to each backend, and why."""
    if lines := terminalreporter.config.stash[_lines]:
        terminalreporter.section("conformance: tests that apply to each backend")
        for line in lines:
            terminalreporter.write_line(line)


def _of_the_kit(cls: object) -> bool:
    return getattr(cls, "__taskqueue_conformance__", False) is True


def _line(name: str, counts: Counter[str]) -> str:
    left_out = {need: number for need, number in counts.most_common() if need}
    line = f"{name}: {counts['']} of {counts.total()}"
    if not left_out:
        return line
    why = ", ".join(f"{need} ({number})" for need, number in left_out.items())
    return f"{line}; left out, as it does not declare: {why}"

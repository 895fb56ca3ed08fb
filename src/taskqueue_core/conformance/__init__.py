"""The conformance kit: subclass `BackendSuite`, open your backend, and pytest proves it against the contract.

::

    from taskqueue_core.conformance import BackendSuite

    class TestMyBackend(BackendSuite):
        async def open_backend(self, clock):
            return MyBackend(clock=clock)

A backend that cannot take a clock sets ``manual_clock = False``; one that is shared or durable defines ``replica``. The
tests of what a backend does not declare are skipped, with a reason that names it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from taskqueue_core.conformance.bench import Bench
    from taskqueue_core.conformance.harness import Harness
    from taskqueue_core.conformance.machine import QueueMachine
    from taskqueue_core.conformance.suite import BackendSuite

__all__ = ["BackendSuite", "Bench", "Harness", "QueueMachine"]

_HOMES = {
    "BackendSuite": "suite",
    "Bench": "bench",
    "Harness": "harness",
    "QueueMachine": "machine",
}


# pytest imports this package for the plugin in every run: what costs time is imported when it is asked for.
def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

"""The conformance kit: subclass `BackendSuite`, open your backend, and pytest proves it against the contract.

::

    from taskqueue_core.backend import Capabilities, Capability
    from taskqueue_conformance import BackendSuite

    class TestMyBackend(BackendSuite):
        capabilities = Capabilities(names=frozenset({Capability.CONTROL}), durable=True)

        async def open_backend(self, clock):
            return MyBackend(clock=clock)

        async def reopen(self, backend): ...

A class says with ``capabilities`` what its backend must declare; one whose backend cannot take a clock sets
``manual_clock = False``. Tests that need more are not collected, and the end of a run says how many, and why. One test
compares what class and backend declare.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from taskqueue_conformance.bench import Bench
    from taskqueue_conformance.harness import Harness
    from taskqueue_conformance.model.machine import QueueMachine
    from taskqueue_conformance.selection import needs
    from taskqueue_conformance.suite import BackendSuite

__all__ = ["BackendSuite", "Bench", "Harness", "QueueMachine", "needs"]

_MODULES = {
    "BackendSuite": "suite",
    "Bench": "bench",
    "Harness": "harness",
    "QueueMachine": "model.machine",
    "needs": "selection",
}


# pytest imports this package for the plugin in every run: what costs time is imported when it is asked for.
def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

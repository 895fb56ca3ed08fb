"""The conformance kit: subclass `BackendSuite`, open your backend, and let pytest check it against the contract.

::

    from taskqueue_core.backend import Capabilities, Capability
    from taskqueue_conformance import BackendSuite

    class TestMyBackend(BackendSuite):
        capabilities = Capabilities(names=frozenset({Capability.CONTROL}), durable=True)

        async def open_backend(self, clock):
            return MyBackend(clock=clock)

        async def reopen(self, backend): ...

``capabilities`` states what the backend must declare. Set ``manual_clock = False`` if the backend cannot use the
clock that ``open_backend`` is given. Tests that need an undeclared capability are not collected; the summary of the run
reports how many. `Harness.test_capabilities` fails if the class and its backend declare different capabilities.
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
    "BackendSuite": "taskqueue_conformance.suite",
    "Bench": "taskqueue_conformance.bench",
    "Harness": "taskqueue_conformance.harness",
    "QueueMachine": "taskqueue_conformance.model.machine",
    "needs": "taskqueue_conformance.selection",
}


# The names in ``__all__`` are imported on first use: pytest imports this package in every run to load the kit's plugin.
def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)

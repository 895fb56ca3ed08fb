"""The memory backend against the conformance kit, used as the author of any other backend would use it.

``TASKQUEUE_KIT_EXAMPLES`` sets the number of random histories; `dev.py soak` sets it high.
"""

import os

from taskqueue_conformance import BackendSuite
from taskqueue_core.backend import Capabilities, Capability
from taskqueue_core.clock import ManualClock
from taskqueue_memory import MemoryBackend


class TestMemoryBackend(BackendSuite):
    """The memory backend keeps every promise of the contract (G4, G6, E5)."""

    capabilities = Capabilities(names=frozenset(Capability))
    max_examples = int(os.environ.get("TASKQUEUE_KIT_EXAMPLES", "40"))

    async def open_backend(self, clock: ManualClock) -> MemoryBackend:
        """Return an empty backend."""
        return MemoryBackend(clock=clock)

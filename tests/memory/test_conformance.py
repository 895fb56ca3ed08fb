"""The memory backend against the kit, as a third party would run it.

``TASKQUEUE_KIT_EXAMPLES`` sets how many random histories it plays; `dev.py soak` sets it high.
"""

import os

from taskqueue_conformance import BackendSuite
from taskqueue_core.backend import Capabilities, Capability
from taskqueue_core.clock import ManualClock
from taskqueue_memory import MemoryBackend


class TestMemoryBackend(BackendSuite):
    """Every promise of the contract (G4, G6, E5)."""

    capabilities = Capabilities(names=frozenset(Capability))
    max_examples = int(os.environ.get("TASKQUEUE_KIT_EXAMPLES", "40"))

    async def open_backend(self, clock: ManualClock) -> MemoryBackend:
        """Open an empty one."""
        return MemoryBackend(clock=clock)

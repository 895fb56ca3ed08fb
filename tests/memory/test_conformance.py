"""The memory backend against the kit, as a third party would run it."""

from taskqueue_core.clock import ManualClock
from taskqueue_core.conformance import BackendSuite
from taskqueue_memory import MemoryBackend


class TestMemoryBackend(BackendSuite):
    """Every promise of the contract (G4, G6, E5)."""

    async def open_backend(self, clock: ManualClock) -> MemoryBackend:
        """Open an empty one."""
        return MemoryBackend(clock=clock)

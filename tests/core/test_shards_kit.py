"""A backend whose queues may be sharded keeps every promise of the one inside (A16)."""

from taskqueue_core.clock import ManualClock
from taskqueue_core.conformance import BackendSuite
from taskqueue_core.succession import ShardedBackend
from taskqueue_memory import MemoryBackend


class TestWhole(BackendSuite):
    """The kit on queues that were never sharded (A16)."""

    max_examples = 30

    async def open_backend(self, clock: ManualClock) -> ShardedBackend:
        """Open an empty one."""
        return ShardedBackend(MemoryBackend(clock=clock))

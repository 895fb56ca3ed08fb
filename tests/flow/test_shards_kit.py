"""The conformance kit on a `ShardedBackend`: it keeps every promise of the backend that it wraps (A16)."""

import pytest

from taskqueue_conformance import BackendSuite
from taskqueue_conformance.bench import KEY, OTHER
from taskqueue_conformance.suites.batches import BatchesSuite
from taskqueue_conformance.suites.blocked import BlockedSuite
from taskqueue_conformance.suites.blocked_lines import BlockedLinesSuite
from taskqueue_conformance.suites.blocked_views import BlockedViewsSuite
from taskqueue_conformance.suites.close import ClosingSuite
from taskqueue_conformance.suites.concurrency import ConcurrencySuite
from taskqueue_conformance.suites.content_digest import ContentDigestSuite
from taskqueue_conformance.suites.dead_letters import DeadLettersSuite
from taskqueue_conformance.suites.deliver import DeliverSuite
from taskqueue_conformance.suites.expire import ExpireSuite
from taskqueue_conformance.suites.flow import FlowSuite
from taskqueue_conformance.suites.handover import HandoverSuite
from taskqueue_conformance.suites.ledger import LedgerSuite
from taskqueue_conformance.suites.publish import PublishSuite
from taskqueue_conformance.suites.rate import RateSuite
from taskqueue_conformance.suites.retry import RetrySuite
from taskqueue_conformance.suites.revocation import RevocationSuite
from taskqueue_conformance.suites.schedule import ScheduleSuite
from taskqueue_conformance.suites.settle import SettleSuite
from taskqueue_conformance.suites.tracking import TrackingSuite
from taskqueue_conformance.suites.unique import UniqueSuite
from taskqueue_conformance.suites.unique_replace import UniqueReplaceSuite
from taskqueue_conformance.suites.waiting import WaitingSuite
from taskqueue_core.backend import Capabilities, Capability
from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.clock import ManualClock
from taskqueue_core.sharding.backend import ShardedBackend
from taskqueue_memory import MemoryBackend

pytestmark = pytest.mark.fast_clock

_ALL = Capabilities(names=frozenset(Capability))


class TestWhole(BackendSuite):
    """The conformance kit on queues that were never sharded (A16)."""

    capabilities = _ALL
    max_examples = 20

    async def open_backend(self, clock: ManualClock) -> ShardedBackend:
        """Open an empty sharded backend."""
        return ShardedBackend(MemoryBackend(clock=clock))


class TestSucceeded(
    BatchesSuite,
    BlockedSuite,
    BlockedLinesSuite,
    BlockedViewsSuite,
    ConcurrencySuite,
    LedgerSuite,
    FlowSuite,
    RateSuite,
    TrackingSuite,
    RevocationSuite,
    HandoverSuite,
    DeadLettersSuite,
    ExpireSuite,
    RetrySuite,
    ScheduleSuite,
    WaitingSuite,
    ClosingSuite,
    SettleSuite,
    DeliverSuite,
    UniqueSuite,
    UniqueReplaceSuite,
    ContentDigestSuite,
    PublishSuite,
):
    """The kit on queues that have one shard again. They keep all promises except those about unknown queues (A16)."""

    capabilities = _ALL

    async def open_backend(self, clock: ManualClock) -> ShardedBackend:
        """Open an empty backend whose queues once had two shards."""
        backend = ShardedBackend(MemoryBackend(clock=clock))
        for key in (KEY, OTHER):
            await backend.generations.succeed(key, 2, QueueSettings())
            await backend.generations.succeed(key, 1, QueueSettings())
        return backend

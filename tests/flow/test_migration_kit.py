"""The conformance kit on a backend that is being migrated: it keeps all promises of the contract (A20)."""

import os

import pytest

from taskqueue_conformance import BackendSuite, Bench
from taskqueue_conformance.suites.batches import BatchesSuite
from taskqueue_conformance.suites.blocked import BlockedSuite
from taskqueue_conformance.suites.blocked_lines import BlockedLinesSuite
from taskqueue_conformance.suites.blocked_views import BlockedViewsSuite
from taskqueue_conformance.suites.content_digest import ContentDigestSuite
from taskqueue_conformance.suites.control import ControlSuite
from taskqueue_conformance.suites.dead_letters import DeadLettersSuite
from taskqueue_conformance.suites.deliver import DeliverSuite
from taskqueue_conformance.suites.handover import HandoverSuite
from taskqueue_conformance.suites.publish import PublishSuite
from taskqueue_conformance.suites.retry import RetrySuite
from taskqueue_conformance.suites.settle import SettleSuite
from taskqueue_conformance.suites.unique import UniqueSuite
from taskqueue_conformance.suites.unique_replace import UniqueReplaceSuite
from taskqueue_core.backend import Capabilities, Capability
from taskqueue_core.clock import ManualClock
from taskqueue_core.migration import MigratingBackend, MigrationMode, rollback, start
from taskqueue_core.rate_limit import RateLimit
from taskqueue_memory import MemoryBackend

pytestmark = pytest.mark.fast_clock


class Pair:
    """Two empty memory backends, combined into one migrating backend."""

    capabilities = Capabilities(names=frozenset(Capability))
    mode = MigrationMode.AVAILABLE

    async def open_backend(self, clock: ManualClock) -> MigratingBackend:
        """Open the migrating backend; the migration is not started yet."""
        return MigratingBackend(
            MemoryBackend(clock=clock), MemoryBackend(clock=clock), mode=self.mode
        )


class TestAvailable(Pair, BackendSuite):
    """The conformance kit on a started migration in mode ``available`` (A20)."""

    max_examples = int(os.environ.get("TASKQUEUE_KIT_EXAMPLES", "20"))

    async def open_backend(self, clock: ManualClock) -> MigratingBackend:
        """Open the migrating backend and start the migration."""
        backend = await super().open_backend(clock)
        await start(backend)
        return backend

    async def test_every_waiting_receive_has_its_token(self, bench: Bench) -> None:
        """A cancelled receive may use up a rate limit token; all other receives still get theirs (law 5; F5)."""
        await bench.limit(rate_limit=RateLimit(max_tokens=4, interval=2))
        await bench.publish(*(f"t{n}" for n in range(7)))
        taken = await bench.take(bench.subscribe(), 9)
        waiting = [
            await bench.start(bench.subscribe(consumer=f"w{n}").receive(1, None)) for n in range(4)
        ]
        waiting.pop(0).cancel()
        for _ in range(4):
            await bench.advance(0.5)
            await bench.hop(10)
        for one in waiting:
            taken += (await bench.outcome(one)).deliveries
        assert len(taken) == 7


class TestStrict(TestAvailable):
    """The conformance kit on a started migration in mode ``strict`` (A20)."""

    max_examples = int(os.environ.get("TASKQUEUE_KIT_EXAMPLES", "10"))
    mode = MigrationMode.STRICT


class _Main(
    BatchesSuite,
    BlockedSuite,
    BlockedLinesSuite,
    BlockedViewsSuite,
    ControlSuite,
    HandoverSuite,
    DeadLettersSuite,
    RetrySuite,
    SettleSuite,
    DeliverSuite,
    UniqueSuite,
    UniqueReplaceSuite,
    ContentDigestSuite,
    PublishSuite,
):
    """The suites of the kit whose calls are routed by the direction of the migration."""

    __test__ = False


class TestRolledBack(Pair, _Main):
    """The conformance kit on a migration that was rolled back (A20)."""

    __test__ = True

    async def open_backend(self, clock: ManualClock) -> MigratingBackend:
        """Open the migrating backend, start the migration and roll it back."""
        backend = await super().open_backend(clock)
        await start(backend)
        await rollback(backend)
        return backend


class TestNotStarted(Pair, _Main):
    """The conformance kit before the start of a migration, when the old backend has all tasks (A20)."""

    __test__ = True

"""The conformance kit on every engine under the access list that ships, and on a cluster (M6, E1).

Among the tests of every day a cluster has the kit's random histories, which make every call of the contract: what else
the kit asks, scripts answer, and these touch one partition alone (`test_scripts_keep_to_their_partition`).

``TASKQUEUE_KIT_EXAMPLES`` sets how many random histories each of them plays; `dev.py soak` sets it high.
"""

import os
import secrets
from functools import cache

import pytest
from pydantic import SecretStr

from taskqueue_conformance import BackendSuite, Harness
from taskqueue_conformance.model.machine import MachineSuite
from taskqueue_conformance.slots.machine import SlotsMachineSuite
from taskqueue_core.backend import Backend, Capabilities, Capability
from taskqueue_core.clock import ManualClock
from taskqueue_redis import RedisBackend, RedisSettings
from tests.redis.clusters import Cluster
from tests.redis.servers import RedisServer


def histories(usual: int) -> int:
    """How many random histories are played, unless the environment says it."""
    return int(os.environ.get("TASKQUEUE_KIT_EXAMPLES", usual))


@cache
def settings_for(url: str, partitions: int) -> RedisSettings:
    """Read once, as the environment is looked through each time: that takes longer than a test."""
    return RedisSettings(url=SecretStr(url), partitions=partitions, _env_file=None)


class OnRedis(Harness):
    """Backends on one server; a prefix keeps each from the others."""

    capabilities = Capabilities(names=frozenset(Capability), shared=True, durable=True)
    max_examples = histories(12)
    url: str
    """the server's: a fixture of the subclass sets it"""
    partitions: int = 1

    def settings(self, prefix: str) -> RedisSettings:
        """Return what a backend with that prefix is told."""
        return settings_for(self.url, self.partitions).model_copy(update={"prefix": prefix})

    async def open_backend(self, clock: ManualClock) -> Backend:
        """Open a backend that shares nothing with others."""
        self.clock = clock
        self.prefix = f"kit{secrets.token_hex(6)}"
        return RedisBackend(clock=clock, settings=self.settings(self.prefix))

    async def replica(self, backend: Backend) -> Backend:  # noqa: ARG002 - the store is known
        """Open another one on the same store."""
        return RedisBackend(clock=self.clock, settings=self.settings(self.prefix))


class TestServer(OnRedis, BackendSuite):
    """On a server, as the user that may do nothing but what the access list allows: fault M6."""

    @pytest.fixture(autouse=True)
    def _url(self, each_acl: RedisServer) -> None:
        self.url = each_acl.url


@pytest.mark.long
class TestHistories(OnRedis, MachineSuite, SlotsMachineSuite):
    """More random histories against the models of the kit: fault M1."""

    max_examples = histories(60)

    @pytest.fixture(autouse=True)
    def _url(self, redis_acl: RedisServer) -> None:
        self.url = redis_acl.url


class OnCluster(OnRedis):
    """On a cluster of three masters, the queues spread over eight partitions."""

    partitions = 8

    @pytest.fixture(autouse=True)
    def _url(self, redis_cluster: Cluster) -> None:
        self.url = redis_cluster.url


class TestClusterHistories(OnCluster, MachineSuite, SlotsMachineSuite):
    """Random histories against the models of the kit, over several partitions and nodes."""


@pytest.mark.long
class TestCluster(OnCluster, BackendSuite):
    """The whole kit on a cluster."""

"""The conformance kit on every engine under the ACL file of the package, and on a cluster (M6, E1).

By default a cluster gets only the random histories of the kit. They make every call of the contract, and the scripts
behind all other tests use a single partition only (`test_scripts_keep_to_their_partition`).

``TASKQUEUE_KIT_EXAMPLES`` sets the number of random histories; `dev.py soak` sets it high.
"""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial

import pytest
import pytest_asyncio
from pydantic import SecretStr

from taskqueue_conformance import BackendSuite, Harness
from taskqueue_conformance.model.machine import MachineSuite
from taskqueue_conformance.slots.machine import SlotsMachineSuite
from taskqueue_conformance.suites.faults import FaultsSuite
from taskqueue_core.backend import Backend, Capabilities, Capability
from taskqueue_core.clock import ManualClock
from taskqueue_redis import RedisBackend, RedisSettings
from tests.chaos.proxy import FaultProxy
from tests.redis.clusters import Cluster
from tests.redis.conftest import ACCESS
from tests.redis.servers import RedisServer


def histories(usual: int) -> int:
    """Return the number of random histories: from the environment, or ``usual``."""
    return int(os.environ.get("TASKQUEUE_KIT_EXAMPLES", usual))


@cache
def settings_for(url: str, partitions: int) -> RedisSettings:
    """Return the settings, cached because reading the environment takes longer than a test."""
    return RedisSettings(url=SecretStr(url), partitions=partitions, _env_file=None)


_HASTE = {"connect_timeout": 0.5, "answer_timeout": 0.5, "operation_timeout": 2.0}
"""short limits, in seconds, for a server that does not answer"""
_SIZES = {"hash": "HLEN", "set": "SCARD", "zset": "ZCARD", "list": "LLEN", "stream": "XLEN"}


def stored(server: RedisServer, prefix: str) -> int:
    """Return the number of keys with a prefix, plus the number of their members."""
    with server.connect() as connection:
        connection.call("AUTH", "root", ACCESS[1])
        keys = [key for key in connection.call("KEYS", "*") if f"{prefix}:".encode() in key]
        kinds = [connection.call("TYPE", key) for key in keys]
        sizes = [_SIZES.get(kind if isinstance(kind, str) else kind.decode()) for kind in kinds]
        return sum(
            1 + (int(connection.call(size, key)) if size else 0)
            for key, size in zip(keys, sizes, strict=True)
        )


class OnRedis(Harness):
    """Backends on one server, each with a random prefix that separates its keys from others."""

    capabilities = Capabilities(
        names=frozenset(Capability),
        shared=True,
        durable=True,
    )
    max_examples = histories(12)
    url: str
    """URL of the server, set by a fixture of the subclass"""
    partitions: int = 1

    def settings(self, prefix: str) -> RedisSettings:
        """Return the settings of a backend with this prefix."""
        return settings_for(self.url, self.partitions).model_copy(update={"prefix": prefix})

    async def open_backend(self, clock: ManualClock) -> Backend:
        """Return a backend on an empty store."""
        self.clock = clock
        self.prefix = f"kit{secrets.token_hex(6)}"
        return RedisBackend(clock=clock, settings=self.settings(self.prefix))

    async def replica(self, backend: Backend) -> Backend:  # noqa: ARG002 - the prefix identifies the store
        """Return another backend on the same store."""
        return RedisBackend(clock=self.clock, settings=self.settings(self.prefix))


class TestServer(OnRedis, BackendSuite):
    """The conformance kit on a server, as the restricted user of the ACL file: faults M1, M6."""

    @pytest.fixture(autouse=True)
    def _url(self, redis_acl: RedisServer) -> None:
        self.url, self.server = redis_acl.url, redis_acl

    def opener(self, backend: Backend) -> Callable[[], Backend]:  # noqa: ARG002 - the prefix identifies the store
        """Return a function that opens a backend on the same store, with a short lease."""
        settings = self.settings(self.prefix).model_copy(update={"lease": 2.0})
        return partial(RedisBackend, settings=settings)

    async def stored(self, backend: Backend) -> int:  # noqa: ARG002 - the prefix identifies the store
        """Count the keys of the backend and the members of each."""
        return await asyncio.to_thread(stored, self.server, self.prefix)


@pytest.mark.long
class TestOtherServers(OnRedis, BackendSuite):
    """The conformance kit on the oldest engine and on those of this machine (fault M1): their commands may differ.

    Killed processes, leftovers and most random histories are left out, because they are about the client and the
    scripts, which are the same.
    """

    max_examples = histories(2)

    @pytest.fixture(autouse=True)
    def _url(self, other_acl: RedisServer) -> None:
        self.url = other_acl.url


class TestLostAnswers(OnRedis, FaultsSuite):
    """Redis carries out commands whose answers the network loses: fault M6."""

    @pytest_asyncio.fixture(autouse=True)
    async def _proxy(self, redis_server: RedisServer) -> AsyncIterator[None]:
        async with FaultProxy(("127.0.0.1", redis_server.port)) as self.proxy:
            host, port = self.proxy.address
            self.url = f"redis://{host}:{port}"
            yield

    def settings(self, prefix: str) -> RedisSettings:
        """Return the settings of a backend that gives up soon."""
        return super().settings(prefix).model_copy(update=_HASTE)

    @contextmanager
    def unanswered(self, backend: Backend) -> Iterator[None]:  # noqa: ARG002 - each test has one proxy
        """Lose every answer of the server."""
        self.proxy.lose_replies(1000)
        try:
            yield
        finally:
            self.proxy.heal()


class OnCluster(OnRedis):
    """Backends on a cluster of three masters, with queues spread over eight partitions."""

    partitions = 8

    @pytest.fixture(autouse=True)
    def _url(self, redis_cluster: Cluster) -> None:
        self.url = redis_cluster.url


class TestClusterHistories(OnCluster, MachineSuite, SlotsMachineSuite):
    """Random histories against the models of the kit, on several partitions and nodes: fault M1."""


@pytest.mark.long
class TestCluster(OnCluster, BackendSuite):
    """The rest of the conformance kit on a cluster.

    Processes that are killed while they use a cluster are in tests/chaos/test_cluster.py.
    """

    max_examples = 1  # `TestClusterHistories` has the random histories

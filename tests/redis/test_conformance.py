"""The conformance kit on every engine, on a cluster, and under the access list that ships (M6, E1)."""

import secrets

import pytest
from pydantic import SecretStr

from taskqueue_core.backend import Backend
from taskqueue_core.clock import ManualClock
from taskqueue_core.conformance import BackendSuite
from taskqueue_redis import RedisBackend, RedisSettings


class RedisKit(BackendSuite):
    """The kit on one server; a backend's prefix keeps it from the others."""

    __test__ = False
    server: str
    """the fixture that gives it"""
    partitions: int = 1

    @pytest.fixture(autouse=True)
    def _url(self, request: pytest.FixtureRequest) -> None:
        self.url: str = request.getfixturevalue(self.server).url

    def settings(self, prefix: str) -> RedisSettings:
        """Return what a backend with that prefix is told."""
        return RedisSettings(
            url=SecretStr(self.url), prefix=prefix, partitions=self.partitions, _env_file=None
        )

    async def open_backend(self, clock: ManualClock) -> Backend:
        """Open a backend that shares nothing with others."""
        self.clock = clock
        self.prefix = f"kit{secrets.token_hex(6)}"
        return RedisBackend(clock=clock, settings=self.settings(self.prefix))

    async def replica(self, backend: Backend) -> Backend:  # noqa: ARG002 - the store is known
        """Open another one on the same store."""
        return RedisBackend(clock=self.clock, settings=self.settings(self.prefix))


class TestRedis70(RedisKit):
    """On a server of 7.0: fault M6, and random histories against the model of the kit (fault M1)."""

    __test__ = True
    server = "redis_70"


class TestRedis62(RedisKit):
    """On a server of 6.2."""

    __test__ = True
    max_examples = 30
    server = "redis_62"


class TestAccessList(RedisKit):
    """As the user that may do nothing but what the access list allows."""

    __test__ = True
    max_examples = 20
    server = "redis_acl"


class TestCluster(RedisKit):
    """On a cluster of three masters, the queues spread over eight partitions."""

    __test__ = True
    partitions = 8
    max_examples = 20
    server = "redis_cluster"

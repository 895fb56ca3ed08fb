"""Fixtures with real Redis and Valkey servers, which all tests of a run share.

Each test uses only keys with its own ``redis_prefix``, so that no test needs FLUSHALL. A test that stops, freezes or
floods a server starts its own with `make_server`.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.redis.clusters import Cluster
from tests.redis.engines import BETWEEN, MAIN, NAMES, OLDEST, Engine, find_engine
from tests.redis.servers import RedisServer

Server = TypeVar("Server", RedisServer, Cluster)
MakeServer = Callable[..., RedisServer]
ACCESS = ("taskqueue", "test-password")
"""the user name and password for `redis_acl`"""
_ACL_FILE = Path(__file__).parents[2] / "src/taskqueue_redis/taskqueue.acl"


def access_list() -> str:
    """Return the ACL file of the package, with a test password and with access to every prefix.

    It also has a user ``root`` with all rights, with which a test can check what the restricted user did.
    """
    rules = _ACL_FILE.read_text("utf-8").replace("{tq:*", "{*")
    rules = re.sub(r"(?m)^(user .*?) [>#]\S+", rf"\1 >{ACCESS[1]}", rules)
    return f"{rules.rstrip()}\nuser root on >{ACCESS[1]} ~* &* +@all\n"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test with the fixture ``each_engine`` once per engine; all but the main engine are marked ``long``.

    For a test marked ``oldest``, the oldest engine is not marked ``long`` either. With ``other_acl``, the main engine
    and the one between it and the oldest are left out.
    """
    if "each_engine" in metafunc.fixturenames:
        quick = {MAIN, OLDEST} if metafunc.definition.get_closest_marker("oldest") else {MAIN}
        without = {MAIN, BETWEEN} if "other_acl" in metafunc.fixturenames else set()
        names = [
            pytest.param(name, marks=() if name in quick else pytest.mark.long)
            for name in NAMES
            if name not in without
        ]
        metafunc.parametrize("each_engine", names, indirect=True, scope="session")


@pytest.fixture(scope="session")
def each_engine(request: pytest.FixtureRequest) -> Engine:
    """Each engine on which the tests run, one after another."""
    return find_engine(request.param)


class _Shared:
    """The servers shared by all tests of a run; each is started when it is first requested."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._servers: dict[object, Any] = {}
        self._open = ExitStack()

    def __call__(self, kind: type[Server], engine: Engine, **more: Any) -> Server:
        key = kind, engine, *more.items()
        if key not in self._servers:
            server = kind(engine, self._factory.mktemp(f"redis-{engine.name}-"), **more)
            self._servers[key] = self._open.enter_context(server)
        found: Server = self._servers[key]
        return found

    def close(self) -> None:
        self._open.close()


@pytest.fixture(scope="session")
def shared_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Shared]:
    """Return a function that starts a server or cluster once per test run: ``shared_servers(RedisServer, engine)``."""
    shared = _Shared(tmp_path_factory)
    try:
        yield shared
    finally:
        shared.close()


@pytest.fixture(scope="session")
def redis_server(shared_servers: _Shared) -> RedisServer:
    """A shared server of the main engine, for tests that need only one engine."""
    return shared_servers(RedisServer, find_engine())


@pytest.fixture(scope="session")
def each_redis(shared_servers: _Shared, each_engine: Engine) -> RedisServer:
    """A shared server of each engine, one after another."""
    return shared_servers(RedisServer, each_engine)


@pytest.fixture(scope="session")
def redis_cluster(shared_servers: _Shared) -> Cluster:
    """A shared cluster of three masters, of the main engine."""
    return shared_servers(Cluster, find_engine())


@pytest.fixture(scope="session")
def redis_acl(shared_servers: _Shared) -> RedisServer:
    """A shared server whose URL has the restricted user of the package's ACL file."""
    return _with_access_list(shared_servers, find_engine())


@pytest.fixture(scope="session")
def other_acl(shared_servers: _Shared, each_engine: Engine) -> RedisServer:
    """As `redis_acl`, of each engine but the main one and the one between it and the oldest."""
    return _with_access_list(shared_servers, each_engine)


def _with_access_list(shared_servers: _Shared, engine: Engine) -> RedisServer:
    server = shared_servers(RedisServer, engine, acl=access_list())
    server.login = ACCESS
    return server


@pytest.fixture
def make_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeServer]:
    """Return a function that creates a server for one test: ``make_server(engine=…, aof=…, config=…, acl=…)``.

    The test starts the server; it is closed after the test.
    """
    with ExitStack() as opened:

        def make(engine: Engine | None = None, **more: Any) -> RedisServer:
            server = RedisServer(
                engine or find_engine(), tmp_path_factory.mktemp("redis-own-"), **more
            )
            opened.callback(server.close)
            return server

        yield make


@pytest.fixture
def redis_prefix() -> str:
    """A key prefix that no other test uses."""
    return f"t{secrets.token_hex(5)}"


@pytest.fixture
def redis_url(redis_server: RedisServer, redis_prefix: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of the shared server.

    Environment variables have this URL and ``redis_prefix``, so that a backend created without settings uses them.
    """
    monkeypatch.setenv("TASKQUEUE_REDIS_URL", redis_server.url)
    monkeypatch.setenv("TASKQUEUE_REDIS_PREFIX", redis_prefix)
    return redis_server.url

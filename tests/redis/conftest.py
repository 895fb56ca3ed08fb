"""Real servers for the tests of this folder, shared by a test run.

A test keeps to keys below its own ``redis_prefix``, so that servers are shared without a FLUSHALL.
One that stops, freezes or floods a server starts one of its own: `make_server`.
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
from tests.redis.engines import MAIN, NAMES, OLDEST, Engine, find_engine
from tests.redis.servers import RedisServer

Server = TypeVar("Server", RedisServer, Cluster)
MakeServer = Callable[..., RedisServer]
ACCESS = ("taskqueue", "test-password")
"""the user of `redis_acl`, and the password"""
_ACL_FILE = Path(__file__).parents[2] / "src/taskqueue_redis/taskqueue.acl"


def access_list() -> str:
    """Return the ACL file that ships, with the password and any prefix of tests in place of its own.

    Besides, there is a user ``root`` who may do anything: so a test can look at what the other did.
    """
    rules = _ACL_FILE.read_text("utf-8").replace("{tq:*", "{*")
    rules = re.sub(r"(?m)^(user .*?) [>#]\S+", rf"\1 >{ACCESS[1]}", rules)
    return f"{rules.rstrip()}\nuser root on >{ACCESS[1]} ~* &* +@all\n"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that asks for ``each_engine`` once for every engine: only the main one is in the quick tier.

    A test with the mark ``oldest`` has the oldest there too.
    """
    if "each_engine" in metafunc.fixturenames:
        quick = {MAIN, OLDEST} if metafunc.definition.get_closest_marker("oldest") else {MAIN}
        names = [
            pytest.param(name, marks=() if name in quick else pytest.mark.long) for name in NAMES
        ]
        metafunc.parametrize("each_engine", names, indirect=True, scope="session")


@pytest.fixture(scope="session")
def each_engine(request: pytest.FixtureRequest) -> Engine:
    """Each engine in turn."""
    return find_engine(request.param)


class _Shared:
    """The servers that are kept for the whole test run, started when they are first asked for."""

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
    """Give one server, or cluster, of a kind per test run: ``shared_servers(RedisServer, engine)``."""
    shared = _Shared(tmp_path_factory)
    try:
        yield shared
    finally:
        shared.close()


@pytest.fixture(scope="session")
def redis_server(shared_servers: _Shared) -> RedisServer:
    """A shared server of the main engine, for tests that need just one."""
    return shared_servers(RedisServer, find_engine())


@pytest.fixture(scope="session")
def each_redis(shared_servers: _Shared, each_engine: Engine) -> RedisServer:
    """A shared server of each engine in turn."""
    return shared_servers(RedisServer, each_engine)


@pytest.fixture(scope="session")
def redis_cluster(shared_servers: _Shared) -> Cluster:
    """A shared cluster of three masters, of the main engine."""
    return shared_servers(Cluster, find_engine())


@pytest.fixture(scope="session")
def redis_acl(shared_servers: _Shared) -> RedisServer:
    """A shared server whose ``url`` has the user of the ACL file that ships, who may do nothing more."""
    return _with_access_list(shared_servers, find_engine())


@pytest.fixture(scope="session")
def each_acl(shared_servers: _Shared, each_engine: Engine) -> RedisServer:
    """The same of each engine in turn."""
    return _with_access_list(shared_servers, each_engine)


def _with_access_list(shared_servers: _Shared, engine: Engine) -> RedisServer:
    server = shared_servers(RedisServer, engine, acl=access_list())
    server.login = ACCESS
    return server


@pytest.fixture
def make_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeServer]:
    """Make servers for one test alone: ``make_server(engine=…, aof=…, config=…, acl=…)``; not started."""
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
    """A key prefix that no other test has."""
    return f"t{secrets.token_hex(5)}"


@pytest.fixture
def redis_url(redis_server: RedisServer, redis_prefix: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of the shared server; the environment has it and ``redis_prefix`` for a backend that is made now."""
    monkeypatch.setenv("TASKQUEUE_REDIS_URL", redis_server.url)
    monkeypatch.setenv("TASKQUEUE_REDIS_PREFIX", redis_prefix)
    return redis_server.url

"""Real servers for the tests of this folder, shared by a test run; its summary lists the engines.

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

from tests.redis.certificates import Certificates, make_certificates
from tests.redis.clusters import Cluster
from tests.redis.engines import CI, REQUIRED, VARIABLE, Engine, Engines, discover, lacking
from tests.redis.servers import RedisServer

Server = TypeVar("Server", RedisServer, Cluster)
MakeServer = Callable[..., RedisServer]
ACCESS = ("taskqueue", "test-password")
"""the user of `redis_acl`, and the password"""
_ACL_FILE = Path(__file__).parents[2] / "src/taskqueue_redis/taskqueue.acl"
_NONE = "none found"


def access_list() -> str:
    """Return the ACL file that ships, with the password and any prefix of tests in place of its own.

    Besides, there is a user ``root`` who may do anything: so a test can look at what the other did.
    """
    rules = _ACL_FILE.read_text("utf-8").replace("{tq:*", "{*")
    rules = re.sub(r"(?m)^(user .*?) [>#]\S+", rf"\1 >{ACCESS[1]}", rules)
    return f"{rules.rstrip()}\nuser root on >{ACCESS[1]} ~* &* +@all\n"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that asks for ``each_engine`` once for every engine."""
    if "each_engine" in metafunc.fixturenames:
        names = [engine.name for engine in discover().found] or [_NONE]
        metafunc.parametrize("each_engine", names, indirect=True, scope="session")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the engines that the tests ran on, and why others are missing."""
    if not discover.cache_info().currsize:
        return
    engines = discover()
    terminalreporter.section("redis engines")
    for engine in engines.found:
        terminalreporter.write_line(f"{engine}{', with TLS' if engine.tls else ''}")
    for name in REQUIRED:
        if engines.named(name) is None:
            terminalreporter.write_line(_missing(name), red=CI, yellow=not CI)


def _missing(name: str) -> str:
    why = f" ({absent})" if (absent := discover().absent) and name.startswith(REQUIRED[0]) else ""
    return (
        f"no redis-server {name} was found{why}: put one on PATH, or name it in {VARIABLE}; "
        "on Debian and Ubuntu `apt-get install redis-server` brings one"
    )


def _required(name: str) -> Engine:
    engine = discover().named(name)
    if engine is None:
        lacking(_missing(name))
    return engine


def _best() -> Engine:
    engine = discover().best
    if engine is None:
        pytest.fail(_missing(" or ".join(REQUIRED)))
    return engine


@pytest.fixture(scope="session")
def engines() -> Engines:
    """Every engine that was found: at least one."""
    _best()
    return discover()


@pytest.fixture(scope="session")
def each_engine(request: pytest.FixtureRequest) -> Engine:
    """Each engine in turn."""
    return _best() if request.param == _NONE else _required(request.param)


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
def redis_62(shared_servers: _Shared) -> RedisServer:
    """A shared redis-server 6.2."""
    return shared_servers(RedisServer, _required("6.2"))


@pytest.fixture(scope="session")
def redis_70(shared_servers: _Shared) -> RedisServer:
    """A shared redis-server 7.0."""
    return shared_servers(RedisServer, _required("7.0"))


@pytest.fixture(scope="session")
def redis_server(shared_servers: _Shared) -> RedisServer:
    """A shared redis-server of the newest engine, for tests that need just one."""
    return shared_servers(RedisServer, _best())


@pytest.fixture(scope="session")
def each_redis(shared_servers: _Shared, each_engine: Engine) -> RedisServer:
    """A shared redis-server of each engine in turn."""
    return shared_servers(RedisServer, each_engine)


@pytest.fixture(scope="session")
def redis_cluster(shared_servers: _Shared) -> Cluster:
    """A shared cluster of three masters, of the newest engine."""
    return shared_servers(Cluster, _best())


@pytest.fixture(scope="session")
def redis_acl(shared_servers: _Shared) -> RedisServer:
    """A shared redis-server 7.0 whose ``url`` has the user of the ACL file that ships, who may do nothing more."""
    server = shared_servers(RedisServer, _required("7.0"), acl=access_list())
    server.login = ACCESS
    return server


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates for servers of this test run."""
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def make_server(tmp_path_factory: pytest.TempPathFactory, engines: Engines) -> Iterator[MakeServer]:
    """Make servers for one test alone: ``make_server(engine=…, aof=…, config=…, acl=…, tls=…)``; not started."""
    with ExitStack() as opened:

        def make(engine: Engine | None = None, **more: Any) -> RedisServer:
            engine = engine or engines.found[-1]
            server = RedisServer(engine, tmp_path_factory.mktemp("redis-own-"), **more)
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

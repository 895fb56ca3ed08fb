"""What redis-py does for the connection: options of a URL, RESP3, discovery of servers, and its late import."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from taskqueue_redis.addresses import HostAddress
from taskqueue_redis.connection.connector import Connector
from taskqueue_redis.connection.failures import AnswerLost, Misconfigured, NotReached
from taskqueue_redis.connection.sentinel import SentinelTopology
from tests.chaos.proxy import FaultProxy
from tests.redis.backends import opened, publish, take, until
from tests.redis.clusters import Cluster, Sentinels
from tests.redis.conftest import MakeServer
from tests.redis.engines import find_engine
from tests.redis.links import KEY, SHORT, Puppet, linked, linked_to_puppet, settings_for
from tests.redis.servers import RedisServer


async def test_options_of_a_url(redis_server: RedisServer) -> None:
    """U28: the options for database, name and protocol are those of redis-py."""
    url = f"{redis_server.url}?db=3&client_name=mine&protocol=3"
    async with linked(url) as link:
        (line,) = [
            line
            for line in (await link.command(KEY, "CLIENT", "LIST")).splitlines()
            if b"name=mine" in line
        ]
        assert b" db=3 " in line
        assert b" resp=3" in line


async def test_the_database_on_a_socket(make_server: MakeServer, tmp_path: Path) -> None:
    """U28: a URL with a socket selects a database."""
    path = tmp_path / "s"
    server = make_server(config={"unixsocket": str(path)}).start()
    async with linked(f"unix://{path}?db=5") as link:
        await link.command(KEY, "SET", "k", 1)
    with server.connect() as connection:
        connection.call("SELECT", 5)
        assert connection.call("GET", "k") == b"1"


@pytest.mark.oldest
async def test_resp3(each_redis: RedisServer, redis_prefix: str) -> None:
    """U28: with RESP3, tasks are published, received, settled and notified like with RESP2."""
    url = f"{each_redis.url}?protocol=3"
    async with opened(url, redis_prefix) as backend, opened(url, redis_prefix) as other:
        consumer = backend.subscribe(["k"], "c")
        waiting = asyncio.create_task(take(consumer, 2))
        await until(lambda: consumer.asleep, "the consumer waits")
        await publish(other, "a", "b", key="k")
        first, second = await waiting
        await consumer.ack(first)
        await consumer.redeliver(second)
        (again,) = await take(consumer, 1)
        assert again.task.id == second.task.id
        await consumer.ack(again)
        assert (await backend.health()).ok


async def test_no_checks_of_idle_connections() -> None:
    """U28: ``health_check_interval=0`` sends no PING, as in redis-py."""
    async with Puppet(lambda _, __: b":1\r\n") as puppet:
        async with linked(f"{puppet.url}?health_check_interval=0") as link:
            for _ in range(10):
                assert await link.command(KEY, "INCR", "k") == 1
        assert [words[0] for words in puppet.heard] == [b"INCR"] * 10


async def test_messages_during_the_login() -> None:
    """U28: with RESP3, a message that arrives with the answer to the login, even in parts, is read as a whole."""
    hello = b"%1\r\n$5\r\nproto\r\n:3\r\n"
    push = b">3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\nx\r\n"

    def answers(_: int, words: Sequence[bytes]) -> bytes:
        if words[0] == b"HELLO":
            return hello
        return push[10:] + b":7\r\n" if words[0] == b"INCR" else b"+OK\r\n"

    class Interrupted(Puppet):
        login = b"+OK\r\n" + push[:10]

    async with Interrupted(answers) as puppet:
        async with linked(f"{puppet.url}?protocol=3", **SHORT) as link:
            assert await link.command(KEY, "INCR", "k", resend=False) == 7
        assert puppet.connections == 1


async def test_a_shared_connection_that_dies_silently(redis_server: RedisServer) -> None:
    """U28: a shared connection is checked while it is idle, and closed if Redis does not answer."""
    async with (
        FaultProxy(("127.0.0.1", redis_server.port)) as proxy,
        linked(
            f"redis://127.0.0.1:{proxy.address[1]}?health_check_interval=1", answer_timeout=0.2
        ) as link,
    ):
        await link.command(KEY, "PING")
        node = link._topology.find(KEY)
        assert node is not None
        assert node.connection is not None
        connection = node.connection
        passed = proxy.passed
        await until(
            lambda: proxy.passed > passed + len("*1  $4  PING  +PONG  "), "a PING and its answer"
        )
        assert connection.lost is None
        proxy.block()
        await until(lambda: connection.lost is not None, "the connection is closed")
        proxy.heal()
        assert await link.command(KEY, "PING") == b"PONG"


REPLIES = {
    "status": b"+OK\r\n",
    "nothing": b"$-1\r\n",
    "number": b":1\r\n",
    "odd": b"*1\r\n$2\r\nip\r\n",
    "no fields": b"*2\r\n$5\r\nflags\r\n$6\r\nmaster\r\n",
    "no number": b"*8\r\n$5\r\nflags\r\n$6\r\nmaster\r\n$2\r\nip\r\n$1\r\na\r\n$4\r\nport\r\n$1\r\nx\r\n"
    b"$12\r\nconfig-epoch\r\n$1\r\n1\r\n",
    "not text": b"*2\r\n$1\r\n\xff\r\n$1\r\n\xff\r\n",
    "garbage": b"HTTP/1.1 400\r\n\r\n",
}


@pytest.mark.parametrize("reply", REPLIES)
@pytest.mark.parametrize("scheme", ["redis+sentinel", "redis+cluster"])
async def test_invalid_replies_about_the_servers(scheme: str, reply: str) -> None:
    """U28: an invalid reply of a Sentinel or node is a failure of the store like any other, and not a raw error."""
    async with Puppet(lambda _, __: REPLIES[reply]) as puppet:
        service = "/main" if scheme == "redis+sentinel" else ""
        url = puppet.url.replace("redis", scheme) + service
        async with linked(url, **SHORT | {"operation_timeout": 0.3}) as link:
            with pytest.raises(NotReached):
                await link.command(KEY, "PING")
            with pytest.raises(NotReached):
                await link.everywhere("PING")


MASTER = b"*6\r\n$2\r\nip\r\n$9\r\n127.0.0.1\r\n$4\r\nport\r\n$1\r\n1\r\n$12\r\nconfig-epoch\r\n$1\r\n1\r\n"


async def test_a_sentinel_that_is_no_longer_asked() -> None:
    """U28: whenever the question to a Sentinel is cancelled, because others have answered, its connection is closed."""
    settings = settings_for("redis+sentinel://127.0.0.1:1/main")
    topology = SentinelTopology(Connector(settings))
    async with Puppet(lambda _, __: MASTER) as puppet:
        place = HostAddress("127.0.0.1", int(puppet.url.rpartition(":")[2]))
        for steps in itertools.count():
            asked = asyncio.create_task(topology._ask(place))
            for _ in range(steps):
                await asyncio.sleep(0)
            asked.cancel()
            await asyncio.wait([asked])
            await until(lambda: puppet.open == 0, f"it is closed if cancelled after {steps} steps")
            if not asked.cancelled():
                assert asked.result() == (1, "127.0.0.1", 1)
                break


proxies: dict[int, int] = {}


def remapped(address: tuple[str, int]) -> tuple[str, int]:
    """Return the address of the proxy of a server."""
    host, port = address
    return host, proxies.get(port, port)


async def test_remapped_addresses(
    tmp_path: Path, redis_cluster: Cluster, redis_prefix: str
) -> None:
    """U28: a function maps the addresses that Sentinels, nodes and redirections name to reachable ones."""
    values = {"address_remap": f"{__name__}:remapped"}
    async with AsyncExitStack() as stack:
        servers = [*redis_cluster.masters]
        group = stack.enter_context(Sentinels(find_engine(), tmp_path, sentinels=1, replicas=0))
        servers += group.servers
        links = [
            await stack.enter_async_context(FaultProxy(("127.0.0.1", one.port))) for one in servers
        ]
        proxies.update(
            {one.port: proxy.address[1] for one, proxy in zip(servers, links, strict=True)}
        )
        stack.callback(proxies.clear)
        async with (
            linked(redis_cluster.url, **values) as link,
            linked(group.url, **values) as other,
        ):
            for n in range(20):
                assert (
                    await link.command(f"{{{redis_prefix}:{n}}}", "INCR", f"{{{redis_prefix}:{n}}}")
                    == 1
                )
            assert await other.command(KEY, "PING") == b"PONG"
            # The slot map is wrong, so that a node names another one.
            key = f"{{{redis_prefix}:0}}"
            owner = link._topology.find(key)
            wrong = next(node for node in await link._topology.masters() if node is not owner)
            link._topology._owners[redis_cluster.slot(key)] = wrong  # type: ignore[attr-defined]
            assert await link.command(key, "GET", key) == b"1"
            assert {node.place.port for node in await link._topology.masters()} == {
                proxy.address[1] for proxy in links[:-1]
            }
        assert all(proxy.opened for proxy in links)


@pytest.mark.parametrize("named", [b"MOVED", b"MOVED x y", b"MOVED 1 host", b"ASK 1 h:x"])
async def test_invalid_redirections(named: bytes) -> None:
    """Row B: an invalid redirection is a failure of the store like any other, and not a raw error."""
    limits = {"operation_timeout": 0.3}
    async with linked_to_puppet(lambda _, __: b"-%b\r\n" % named, **limits) as (_, link):
        with pytest.raises((NotReached, AnswerLost)):
            await link.command(KEY, "PING")


async def test_a_function_for_addresses_that_fails(redis_cluster: Cluster) -> None:
    """Row B: an error of the function that maps addresses names the setting, in discovery and in redirections."""
    values: dict[str, Any] = {"address_remap": {}.__getitem__}
    async with linked(redis_cluster.url, **values) as link:
        with pytest.raises(Misconfigured, match="ADDRESS_REMAP"):
            await link.command(KEY, "PING")
    moved = b"-MOVED 1 h:1\r\n"
    async with linked_to_puppet(lambda _, __: moved, **values) as (_, link):
        with pytest.raises(Misconfigured, match="ADDRESS_REMAP"):
            await link.command(KEY, "PING")


def run(code: str, *, within: float = 60.0) -> str:
    """Run Python code in a new process and return its output."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=within, check=True
    )
    return done.stdout.strip()


def test_redis_py_is_imported_late() -> None:
    """U28: importing this package and reading its settings do not import redis-py; creating a backend does."""
    code = (
        "import sys; from taskqueue_redis.backend import RedisBackend; "
        "from taskqueue_redis.config import RedisSettings; values = RedisSettings(_env_file=None); "
        "late = 'redis' not in sys.modules; RedisBackend(settings=values); print(late, 'redis' in sys.modules)"
    )
    assert run(code) == "True True"


def test_a_fork_during_the_import() -> None:
    """U28: a process that is forked while another thread imports redis-py can create a backend."""
    code = """
import os, sys, threading
from taskqueue_redis.backend import RedisBackend
from taskqueue_redis.config import RedisSettings

values, started = RedisSettings(_env_file=None), threading.Event()
pause = threading.Event()

class Finder:
    def find_spec(self, name, *_):
        if name == "redis.crc" or name == "redis.asyncio.connection":
            started.set()
            pause.wait(1)

sys.meta_path.insert(0, Finder())
thread = threading.Thread(target=RedisBackend, kwargs={"settings": values})
thread.start()
started.wait()
if (child := os.fork()) == 0:
    RedisBackend(settings=values)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
thread.join()
"""
    assert run(code) == "7"

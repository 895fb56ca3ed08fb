"""The test servers themselves: engines, clusters, replicas, and servers that are killed or frozen."""

from __future__ import annotations

import pytest

from tests.binaries.folders import Unavailable
from tests.redis.clusters import Cluster, follow, in_step
from tests.redis.conftest import MakeServer
from tests.redis.engines import Engine, find_engine
from tests.redis.resp import RedisError
from tests.redis.servers import RedisServer


@pytest.mark.oldest
def test_each_engine_answers(each_redis: RedisServer, each_engine: Engine) -> None:
    """Fault M6: a shared server runs the product and version that its engine names."""
    told = each_redis.info("server")
    assert (
        told["redis_version" if each_engine.product == "redis" else "valkey_version"]
        == each_engine.release
    )


def test_an_engine_that_is_absent() -> None:
    """Fault M6: the error for an unknown engine names it and lists the available ones."""
    with pytest.raises(
        Unavailable, match=r"redis-5.0 is not among .* valkey-9.1, valkey-8.1, redis-6.2"
    ):
        find_engine("redis-5.0")


def test_killed_server_comes_back_with_its_data(
    each_engine: Engine, make_server: MakeServer
) -> None:
    """A killed server starts again on the same port with the data of its append-only file (fault B1)."""
    server = make_server(each_engine, config={"appendfsync": "always"}).start()
    port, pid = server.port, server.pid
    server.call("SET", "kept", "yes")
    server.kill()
    assert not server.running
    with pytest.raises(OSError, match="refused"):
        server.call("PING")
    server.start()
    assert (server.port, server.call("GET", "kept")) == (port, b"yes")
    assert server.pid != pid


def test_frozen_server_answers_nothing(make_server: MakeServer) -> None:
    """A frozen server accepts connections but does not answer; after thawing, it continues (fault B10)."""
    server = make_server().start()
    with server.connect(timeout=0.2) as connection:
        server.freeze()
        with pytest.raises(TimeoutError):
            connection.call("PING")
        server.thaw()
        assert server.call("PING") == "PONG"


def test_minimal_access(redis_acl: RedisServer) -> None:
    """The restricted user of the ACL file can connect, but not run FLUSHALL."""
    assert redis_acl.call("PING") == "PONG"
    with pytest.raises(RedisError, match="NOPERM"):
        redis_acl.call("FLUSHALL")
    assert "@127.0.0.1" in redis_acl.url


def test_cluster(redis_cluster: Cluster) -> None:
    """A cluster serves every slot, and each key has an owner (fault M6)."""
    assert len({redis_cluster.owner(f"key-{n}").port for n in range(50)}) == 3
    redis_cluster.call("{t}:a", "SET", "{t}:a", "1")
    assert redis_cluster.call("{t}:a", "GET", "{t}:a") == b"1"
    assert [len(keys) for keys in redis_cluster.everywhere("KEYS", "{t}:a")].count(1) == 1


def test_replica_is_waited_for(make_server: MakeServer) -> None:
    """``follow`` returns only when the replica has all data of its master (fault C1)."""
    master, replica = make_server().start(), make_server().start()
    master.call("SET", "key", "x" * 100_000)
    follow(replica, master)
    assert replica.call("GET", "key") == b"x" * 100_000
    assert in_step(master, replica)

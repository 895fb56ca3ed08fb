"""Clusters and Sentinels: commands reach the current master of a key, also after a change of roles."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from taskqueue_redis.connection.client import Ask, RedisClient
from taskqueue_redis.connection.cluster import slot_of
from taskqueue_redis.connection.failures import Misconfigured, NotReached
from taskqueue_redis.connection.pubsub import PubSubListener
from taskqueue_redis.setup.aof_rewrite import parse_info
from tests.redis.backends import until
from tests.redis.clusters import Cluster, Sentinels, in_step
from tests.redis.engines import find_engine
from tests.redis.links import SHORT, linked

KEYS = [f"{{tq:{n}}}:n" for n in range(30)]


def count(link: RedisClient, key: str, **more: Any) -> Any:
    """Increment a key and return the new value."""
    return link.command(key, "INCR", key, **more)


async def test_slots(redis_cluster: Cluster) -> None:
    """D18: the client computes the same hash slot for a key as Redis, using its first hash tag."""
    for key in ("a", "{a}b", "a{}b", "{}{a}", "a{b", "a}b{c}", "{tq:0}:é", "é{è}", "", "{{a}}"):
        assert slot_of(key) == redis_cluster.slot(key)


async def test_every_key_finds_its_node(redis_cluster: Cluster, redis_prefix: str) -> None:
    """Each command runs on the node of its key over one connection per node.

    Commands for all masters run on each of them.
    """
    keys = [f"{{{redis_prefix}:{n}}}:n" for n in range(50)]
    async with linked(redis_cluster.url) as link:
        assert await asyncio.gather(*(count(link, key) for key in keys)) == [1] * 50
        followed = await asyncio.gather(
            *(count(link, key, follow=lambda _: ("WAIT", 0, 0)) for key in keys)
        )
        assert followed == [(2, 0)] * 50
        assert sorted(await link.everywhere("DBSIZE")) == sorted(redis_cluster.everywhere("DBSIZE"))
        with pytest.raises(Misconfigured, match="CROSSSLOT"):
            await link.command(keys[0], "DEL", *keys)


async def test_at_each_master(redis_cluster: Cluster) -> None:
    """``at_each_master`` calls a function once per master, whose commands all go to this master."""
    asked = [node.call("CLUSTER", "MYID") for node in redis_cluster.masters]

    async def about(ask: Ask) -> tuple[bytes, str]:
        name = await ask(("CLUSTER", "MYID"))
        info = parse_info(await ask(("INFO", "server")))
        return name, info["tcp_port"]

    async with linked(redis_cluster.url) as link:
        told = dict(await link.at_each_master(about))
    ports = [str(node.port) for node in redis_cluster.masters]
    assert told == dict(zip(asked, ports, strict=True))


async def test_a_signal_reaches_the_whole_cluster(
    redis_cluster: Cluster, redis_prefix: str
) -> None:
    """One listener receives messages published at any node of the cluster."""
    heard: list[bytes] = []
    channel = f"{{{redis_prefix}:0}}:bell:a"
    async with linked(redis_cluster.url) as link:
        signal = PubSubListener(link, lambda _, message: heard.append(message), lambda: None)
        await signal.listen(channel)
        for n, node in enumerate(redis_cluster.masters):
            node.call("PUBLISH", channel, n)
        await until(lambda: len(heard) == 3, "every node's message is heard")
        await signal.aclose()


async def test_slots_that_move(redis_cluster: Cluster, redis_prefix: str) -> None:
    """MOVED, ASK and TRYAGAIN are followed: while slots are moved, every command runs exactly once."""
    async with linked(redis_cluster.url) as link:
        key, other = f"{{{redis_prefix}:0}}:n", f"{{{redis_prefix}:0}}:m"
        slot = redis_cluster.slot(key)
        source = redis_cluster.owner(key)
        target = next(node for node in redis_cluster.masters if node is not source)
        ids = {node: node.call("CLUSTER", "MYID").decode() for node in (source, target)}
        done = asyncio.Event()
        counted: list[int] = []

        async def keep_counting() -> None:
            while not done.is_set():
                counted.append(await count(link, key, resend=False))

        counters = [asyncio.create_task(keep_counting()) for _ in range(5)]
        for a, b in ((source, target), (target, source)) * 2:
            await asyncio.sleep(0.02)
            await count(link, other)
            b.call("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[a])
            a.call("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[b])
            a.call("MIGRATE", "127.0.0.1", b.port, key, 0, 5000)
            pair = asyncio.create_task(link.command(key, "MGET", key, other))
            await asyncio.sleep(0.02)  # while the keys are on two nodes, the reply is TRYAGAIN
            a.call("MIGRATE", "127.0.0.1", b.port, other, 0, 5000)
            for node in (b, a):
                node.call("CLUSTER", "SETSLOT", slot, "NODE", ids[b])
            assert len(await pair) == 2
        done.set()
        await asyncio.gather(*counters)
        assert sorted(counted) == list(range(1, len(counted) + 1))
        assert await link.command(other, "GET", other) == b"4"


async def test_a_node_that_dies(tmp_path: Path) -> None:
    """Faults B1 and C7: a dead node delays only commands for its own keys, until its replica has taken over.

    The listener connects to another node.
    """
    config = {"cluster-require-full-coverage": "no", "cluster-node-timeout": "500"}
    with Cluster(find_engine(), tmp_path, replicas=1, config=config) as cluster:
        async with linked(cluster.url, operation_timeout=15, connect_timeout=0.5) as link:
            reopened: list[int] = []
            signal = PubSubListener(link, lambda _, __: None, lambda: reopened.append(1))
            await signal.listen("b")
            await asyncio.gather(*(count(link, key) for key in KEYS))
            dead = next(
                node for node in cluster.masters if b"cmd=subscribe" in node.call("CLIENT", "LIST")
            )
            theirs = [key for key in KEYS if cluster.owner(key) is dead]
            others = [key for key in KEYS if key not in theirs]
            (replica,) = cluster.replicas[dead.port]
            await until(lambda: in_step(dead, replica), "the replica has all")
            dead.kill()
            waiting = [asyncio.create_task(count(link, key)) for key in theirs]
            answers = await asyncio.gather(*(count(link, key) for key in others))
            assert answers == [2] * len(others)
            assert not any(task.done() for task in waiting)
            assert await asyncio.gather(*waiting) == [2] * len(theirs)
            await until(lambda: bool(reopened) and signal.works, "the bell works again")
            assert len(await link.everywhere("PING")) == 3
            await signal.aclose()


async def test_a_failover_of_sentinels(tmp_path: Path) -> None:
    """Fault C8: if the master is frozen, the client uses the replica that the Sentinels promote.

    It no longer uses the old master.
    """
    with Sentinels(find_engine(), tmp_path) as group:
        limits = {"operation_timeout": 20, "answer_timeout": 0.5, "connect_timeout": 0.5}
        async with linked(group.url, **limits) as link:
            reopened: list[int] = []
            signal = PubSubListener(
                link, lambda _, __: None, lambda: reopened.append(1), quiet=0.3, patience=0.3
            )
            await signal.listen("b")
            first = await count(link, "n")
            former = group.master
            (replica,) = (server for server in group.servers if server is not former)
            await until(lambda: in_step(former, replica), "the replica has all")
            former.freeze()
            # The counter rises by more than one if a late answer made the client repeat the command.
            second = await count(link, "n")
            assert second > first
            assert group.master is replica
            await until(lambda: bool(reopened) and signal.works, "the bell works again")
            former.thaw()
            group.sentinels[0].kill()  # the remaining Sentinels are enough
            link._topology.doubt(link._topology.find("n"))
            third = await count(link, "n")
            assert third > second
            assert replica.call("GET", "n") == b"%d" % third
            await signal.aclose()
        wrong = group.url.replace(f"/{group.service}", "/nobody")
        async with linked(wrong, **SHORT) as link:
            with pytest.raises(Misconfigured, match="correct the service"):
                await count(link, "n")
        for sentinel in group.sentinels:
            sentinel.kill()
        async with linked(group.url, **SHORT | {"operation_timeout": 0.5}) as link:
            with pytest.raises(NotReached):
                await count(link, "n")


async def test_a_cluster_that_is_out_of_reach(tmp_path: Path) -> None:
    """Fault E9: if no node answers, or none has slots, the error says so and that nothing was executed."""
    cluster = Cluster(find_engine(), tmp_path, masters=1)
    try:
        async with linked(cluster.url, **SHORT | {"operation_timeout": 0.4}) as link:
            with pytest.raises(NotReached, match="refused"):
                await count(link, "n")
            cluster.masters[0].start()
            with pytest.raises(NotReached, match="no slots"):
                await count(link, "n")
            with pytest.raises(NotReached, match="no slots"):
                await link.everywhere("PING")
    finally:
        cluster.close()

"""Groups of redis-servers for tests: a cluster, or a master with replicas and Sentinels."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.redis.engines import Engine
from tests.redis.servers import RedisServer, Startable, wait_until

_SLOTS = 16_384
_CLUSTER = {
    "cluster-enabled": "yes",
    "cluster-config-file": "nodes.conf",
    "cluster-node-timeout": "15000",  # the default; tests of failovers set a short one
    "cluster-allow-replica-migration": "no",  # so that each master keeps the replicas of the test
    "cluster-replica-validity-factor": "0",  # so that a replica may always take over
}
_SOON = ("PUBLISH-PERIOD", 100, "INFO-PERIOD", 200)
"""Milliseconds between the announcements of a Sentinel and its INFO queries; the defaults are 2 and 10 seconds.

The periods of PING and of the queries between Sentinels stay unchanged: if these are short, all Sentinels start an
election at the same time, and none gets enough votes.
"""


class _Group(Startable):
    """Several servers that are closed together."""

    def __init__(self) -> None:
        self._servers = ExitStack()

    def _add(self, server: RedisServer) -> RedisServer:
        self._servers.callback(server.close)
        return server

    def close(self) -> None:
        """Stop every server."""
        self._servers.close()


class Cluster(_Group):
    """A cluster whose slots are spread evenly over its masters, each with ``replicas`` replicas.

    ``config`` applies to every node.
    """

    def __init__(
        self,
        engine: Engine,
        folder: Path,
        *,
        masters: int = 3,
        replicas: int = 0,
        aof: bool = True,
        config: Mapping[str, str] | None = None,
        acl: str | None = None,
    ) -> None:
        """Configure the nodes without starting them."""
        super().__init__()
        self.nodes = [
            self._add(
                RedisServer(
                    engine,
                    folder / f"node-{n}",
                    aof=aof,
                    config={**_CLUSTER, **(config or {})},
                    acl=acl,
                )
            )
            for n in range(masters * (1 + replicas))
        ]
        self.masters = self.nodes[:masters]
        """the nodes that were the first masters; after a failover, use `owner` to find the current ones"""
        self.replicas = {
            master.port: self.nodes[masters + n :: masters] for n, master in enumerate(self.masters)
        }
        """the first replicas of each master, by the master's port"""

    @property
    def url(self) -> str:
        """The cluster URL, with the address of the first master."""
        return f"redis+cluster://127.0.0.1:{self.masters[0].port}"

    def _start(self) -> None:
        """Start the nodes, join them to a cluster, and wait until all report it as ready and replicas are in sync."""
        for node in self.nodes:
            node.start(wait=False)
        for node in self.nodes:
            node.ready()
        if "cluster_known_nodes:1\r" in self.masters[0].call("CLUSTER", "INFO").decode():
            self._join()
        self.wait_ready()

    def _join(self) -> None:
        count = len(self.masters)
        ids = [node.call("CLUSTER", "MYID").decode() for node in self.masters]
        for epoch, node in enumerate(self.nodes, 1):
            node.call("CLUSTER", "SET-CONFIG-EPOCH", epoch)
        for n, master in enumerate(self.masters):
            slots = range(n * _SLOTS // count, (n + 1) * _SLOTS // count)
            master.call("CLUSTER", "ADDSLOTS", *slots)  # because Redis 6.2 has no ADDSLOTSRANGE
        for node in self.nodes:  # for each pair of nodes, because gossip would take seconds
            for other in self.nodes:
                if other is not node:
                    node.call("CLUSTER", "MEET", "127.0.0.1", other.port)
        wait_until(self._acquainted, "every node knows every other")
        for n, master in enumerate(self.masters):
            for replica in self.replicas[master.port]:
                replica.call("CLUSTER", "REPLICATE", ids[n])

    def _acquainted(self) -> bool:
        return all(
            len(lines := node.call("CLUSTER", "NODES").decode().splitlines()) == len(self.nodes)
            and not any("handshake" in line or "disconnected" in line for line in lines)
            for node in self.nodes
        )

    def wait_ready(self, *, seconds: float = 20.0) -> None:
        """Wait until every running node reports the cluster as ready, and the running replicas are in sync."""

        def well() -> bool:
            running = [node for node in self.nodes if node.running]
            for node in running:
                if b"cluster_state:ok" not in node.call("CLUSTER", "INFO"):
                    return False
            return all(_in_step_with_its_master(node) for node in running)

        wait_until(well, "the cluster is well and its replicas are in step", seconds=seconds)

    def wait_down(self, *, seconds: float = 20.0) -> None:
        """Wait until every running node reports that the cluster is down."""

        def down() -> bool:
            running = [node for node in self.nodes if node.running]
            return all(b"cluster_state:fail" in node.call("CLUSTER", "INFO") for node in running)

        wait_until(down, "every running node says that the cluster is down", seconds=seconds)

    def slot(self, key: str | bytes) -> int:
        """Return the hash slot of a key."""
        return int(self._any().call("CLUSTER", "KEYSLOT", key))

    def owner(self, key: str | bytes) -> RedisServer:
        """Return the node that currently serves a key, according to a running node."""
        return self._at(self.slot(key))

    def move(
        self, slot: int, target: RedisServer, *, pipeline: int = 10, pause: float = 0.0
    ) -> None:
        """Move a slot to another master as ``redis-cli --cluster reshard`` does, ``pipeline`` keys at a time.

        Clients may use the slot during the move. If the target has the slot already, nothing happens. ``pause``
        is the number of seconds to sleep after each step.
        """
        source = self._at(slot)
        if source is target:
            return
        ids = {node: node.call("CLUSTER", "MYID").decode() for node in (source, target)}
        target.call("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
        source.call("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
        while keys := source.call("CLUSTER", "GETKEYSINSLOT", slot, pipeline):
            place = ("127.0.0.1", target.port)
            source.call("MIGRATE", *place, "", 0, 60_000, "KEYS", *keys)
            time.sleep(pause)
        for node in (target, source):
            node.call("CLUSTER", "SETSLOT", slot, "NODE", ids[target])
        wait_until(lambda: self._agreed(slot, target), "every node knows where the slot is")

    def _agreed(self, slot: int, target: RedisServer) -> bool:
        running = [node for node in self.nodes if node.running]
        return all(self._at(slot, node) is target for node in running)

    def _at(self, slot: int, asked: RedisServer | None = None) -> RedisServer:
        """Return the node that currently serves a slot, according to ``asked`` or any running node."""
        for first, last, (_, port, *_), *_ in (asked or self._any()).call("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(node for node in self.nodes if node.port == port)
        raise LookupError(f"nobody owns slot {slot}")

    def call(self, key: str | bytes, *words: str | bytes | float) -> Any:
        """Send one command to the node that serves a key, and return the reply."""
        return self.owner(key).call(*words)

    def everywhere(self, *words: str | bytes | float) -> list[Any]:
        """Send one command to every running master, and return the replies."""
        running = [node for node in self.nodes if node.running]
        masters = [node for node in running if node.info("replication")["role"] == "master"]
        return [node.call(*words) for node in masters]

    def _any(self) -> RedisServer:
        return next(node for node in self.nodes if node.running)


class Sentinels(_Group):
    """A master, its replicas, and Sentinels that monitor them."""

    service = "main"
    """name under which the Sentinels know the master"""

    def __init__(
        self,
        engine: Engine,
        folder: Path,
        *,
        replicas: int = 1,
        sentinels: int = 3,
        config: Mapping[str, str] | None = None,
    ) -> None:
        """Configure the servers without starting them; ``config`` applies to the master and its replicas."""
        super().__init__()
        self.servers = [
            self._add(RedisServer(engine, folder / f"server-{n}", config=config))
            for n in range(1 + replicas)
        ]
        watched = {
            "sentinel monitor": f"{self.service} 127.0.0.1 {self.servers[0].port} {sentinels // 2 + 1}",
            "sentinel down-after-milliseconds": f"{self.service} 800",
            "sentinel failover-timeout": f"{self.service} 4000",
            "bind": "127.0.0.1",
            "protected-mode": "no",
        }
        self.sentinels = [
            self._add(RedisServer(engine, folder / f"sentinel-{n}", config=watched, sentinel=True))
            for n in range(sentinels)
        ]

    @property
    def url(self) -> str:
        """The Sentinel URL, with the addresses of all Sentinels."""
        places = ",".join(f"127.0.0.1:{one.port}" for one in self.sentinels)
        return f"redis+sentinel://{places}/{self.service}"

    @property
    def master(self) -> RedisServer:
        """The server that most Sentinels currently report as the master."""
        told = [
            int(one.call("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service)[1])
            for one in self.sentinels
            if one.running
        ]
        port = max(told, key=told.count)
        return next(server for server in self.servers if server.port == port)

    def _start(self) -> None:
        """Start all servers, and wait until the replicas are in sync and the Sentinels know all of them."""
        for server in self.servers:
            server.start()
        for replica in self.servers[1:]:
            follow(replica, self.servers[0])
        for sentinel in self.sentinels:
            sentinel.start(wait=False)
        for sentinel in self.sentinels:
            sentinel.ready()
            if sentinel.engine.version >= (7, 0):  # because 6.2 has no SENTINEL DEBUG
                sentinel.call("SENTINEL", "DEBUG", *_SOON)
        wait_until(self._aware, "every Sentinel knows the replicas and the other Sentinels")

    def _aware(self) -> bool:
        for sentinel in self.sentinels:
            words = sentinel.call("SENTINEL", "MASTER", self.service)
            facts = dict(zip(words[::2], words[1::2], strict=True))
            known = int(facts[b"num-slaves"]), int(facts[b"num-other-sentinels"])
            if facts[b"flags"] != b"master" or known != (
                len(self.servers) - 1,
                len(self.sentinels) - 1,
            ):
                return False
        return True


def follow(replica: RedisServer, master: RedisServer) -> None:
    """Make one server the replica of another, and wait until it is in sync."""
    replica.call("REPLICAOF", "127.0.0.1", master.port)
    wait_until(lambda: in_step(master, replica), "the replica is in step")


def in_step(master: RedisServer, replica: RedisServer) -> bool:
    """Return whether the replica is connected and has read everything that the master has written."""
    theirs = replica.info("replication")
    return (
        theirs.get("master_link_status") == "up"
        and theirs.get("master_port") == str(master.port)
        and int(theirs["slave_repl_offset"])
        >= int(master.info("replication")["master_repl_offset"])
    )


def _in_step_with_its_master(node: RedisServer) -> bool:
    role = node.call("ROLE")
    return role[0] == b"master" or bool(role[3] == b"connected")

"""The topology of a Redis Cluster: which node holds which slot, according to the nodes themselves."""

from __future__ import annotations

import asyncio
from functools import lru_cache
from typing import Any

from redis.asyncio.cluster import ClusterNode, NodesManager
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from taskqueue_redis.addresses import HostAddress
from taskqueue_redis.connection.connector import Connector
from taskqueue_redis.connection.failures import NotReached, Policy, Unreachable, classify_connecting
from taskqueue_redis.connection.nodes import Node
from taskqueue_redis.connection.topology import Topology

_PAUSE = 0.25  # minimum number of seconds between two requests for the slot map after failures


@lru_cache(4096)
def slot_of(key: str) -> int:
    """Return the cluster slot of a key."""
    return key_slot(key.encode())


class ClusterTopology(Topology):
    """The topology of a cluster with many masters. An unavailable master delays only commands for its own slots."""

    def __init__(self, connector: Connector) -> None:
        super().__init__(connector)
        self._owners: list[Node | None] = []
        self._doubted: Node | None = None
        self._asked_at = 0.0

    def find(self, key: str) -> Node | None:
        return self._owners[slot_of(key)] if self._owners else None

    async def masters(self) -> list[Node]:
        if not self._owners or self._discovery.under_way:
            await self._find_out()
        return list({node.place: node for node in self._owners if node is not None}.values())

    def in_charge(self, place: HostAddress) -> bool:
        return any(node is not None and node.place == place for node in self._owners)

    def doubt(self, node: Node | None) -> None:
        self._doubted = node
        now = asyncio.get_running_loop().time()
        if now - self._asked_at >= _PAUSE:
            self._asked_at = now
            self._discovery.start()

    def moved(self, slot: int, place: HostAddress) -> None:
        node = self.node(place)
        if self._owners:
            self._owners[slot] = node
        self.doubt(node)

    async def _discover(self) -> bool:
        self._asked_at = asyncio.get_running_loop().time()
        options, seeds = self.connector.options(), self.connector.settings.address.hosts
        manager = NodesManager(
            [ClusterNode(place.host, place.port, **options) for place in {*self._nodes, *seeds}],
            require_full_coverage=False,
            connection_kwargs=options,
            dynamic_startup_nodes=False,
            address_remap=self._reachable,
        )
        doubted = str(self._doubted.place) if self._doubted else None
        try:
            # An invalid reply raises errors of any class; a cluster without slots raises a LookupError.
            await manager.initialize(last_failed_node_name=doubted)
        except Exception as error:  # noqa: BLE001
            if not isinstance(error, LookupError):
                raise Unreachable(*classify_connecting(error)) from None
            raise Unreachable(Policy.SEEK, NotReached("the cluster has no slots (yet)")) from None
        finally:
            for nodes in ("startup_nodes", "nodes_cache"):
                await manager.aclose(nodes)
        # Also create nodes for the replicas, which can be asked for the slot map if no master responds.
        places = {
            node.name: HostAddress(node.host, int(node.port))
            for node in manager.nodes_cache.values()
        }
        known = {name: self.node(place) for name, place in places.items()}
        masters = {slot: known[nodes[0].name] for slot, nodes in manager.slots_cache.items()}
        self._owners = [masters.get(slot) for slot in range(REDIS_CLUSTER_HASH_SLOTS)]
        self.keep({*places.values(), *seeds})
        return True

    def _reachable(self, address: tuple[Any, int]) -> tuple[str, int]:
        # If the host of a node is unknown, use the first host in the settings.
        host = (
            address[0]
            if address[0] not in {None, "", "?"}
            else self.connector.settings.address.hosts[0].host
        )
        return self.connector.remap((host, int(address[1])))

"""The topology of a master with Sentinels. They are asked for the master's address whenever it may have changed."""

from __future__ import annotations

import asyncio
from typing import Any

from taskqueue_redis.addresses import HostAddress
from taskqueue_redis.connection.failures import NotReached, Policy, Unreachable, classify_connecting
from taskqueue_redis.connection.nodes import Node
from taskqueue_redis.connection.topology import Topology


class SentinelTopology(Topology):
    """The topology of one master, whose address the Sentinels report. No other server is ever used as master."""

    def doubt(self, node: Node | None) -> None:
        if node is self._master:
            self._master = None

    async def _discover(self) -> bool:
        _, host, port = max(await self._reports())  # that of the latest failover
        node = self.node(HostAddress(host, port))
        connection = await node.reach()
        # Sentinels may report a server that is no longer the master, so ask the server itself for its role.
        try:
            role: Any = await connection.call("ROLE")
            is_master = role[0] == b"master"
        except Exception as error:  # noqa: BLE001 - an invalid reply raises errors of any class
            raise Unreachable(*classify_connecting(error)) from None
        if not is_master:
            raise Unreachable(Policy.SEEK, NotReached(f"{node.place} is not the master (yet)"))
        self._master = node
        self.keep({node.place})
        return True

    async def _reports(self) -> list[tuple[int, str, int]]:
        """Return the reports of a majority of the Sentinels, or of all that answer in time if those are fewer.

        A report is the epoch of the failover and the master's address. Raises `Unreachable` if no Sentinel answers.
        """
        places = self.connector.settings.address.hosts
        asked = [asyncio.create_task(self._ask(place)) for place in places]
        reports: list[tuple[int, str, int]] = []
        problem: Unreachable | None = None
        try:
            for answer in asyncio.as_completed(asked):
                try:
                    reports.append(await answer)
                except Unreachable as error:
                    # Prefer an error in the configuration: it helps the caller more than an unavailable Sentinel does.
                    if problem is None or error.policy is Policy.REPAIR:
                        problem = error
                if len(reports) > len(places) // 2:
                    break
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        if not reports:
            raise problem or Unreachable(Policy.SEEK, NotReached("no Sentinel answers"))
        return reports

    async def _ask(self, place: HostAddress) -> tuple[int, str, int]:
        settings = self.connector.settings
        connection = None
        try:
            async with asyncio.timeout(settings.connect_timeout):
                connection = await self.connector.open(place, sentinel=True)
                reply: Any = await connection.call("SENTINEL", "MASTER", settings.address.service)
            state = dict(zip(reply[::2], reply[1::2], strict=True))
            address = self.connector.remap((state[b"ip"].decode(), int(state[b"port"])))
            return int(state[b"config-epoch"]), *address
        except Exception as error:  # noqa: BLE001 - an invalid reply raises errors of any class
            raise Unreachable(*classify_connecting(error)) from None
        finally:
            if connection is not None:
                connection.give_up("the Sentinel was asked")

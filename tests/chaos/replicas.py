"""Chaos runs with servers: producers publish over HTTP, workers use WebSockets, and a balancer is simulated."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from taskqueue_core.capabilities import control_of
from taskqueue_core.retry import RetryPolicy
from tests.chaos.cast import Actor
from tests.chaos.proxy import Address, FaultProxy
from tests.chaos.world import Shape, World
from tests.redis.reserved import PortHold, reserve

_SERVERS = 2
_HOUSEKEEPING = 2.0
"""seconds between two passes of maintenance; a fixed default of the servers"""
_WORKERS = 3


class Replicas(World):
    """A run with servers on one Redis. Each client's link leads to the running servers in turn, or to a fixed one.

    ``pinned`` maps a role and number, such as ``("worker", 0)``, to the number of its server.
    """

    def __init__(
        self,
        folder: Path,
        shape: Shape | None = None,
        *,
        servers: int = _SERVERS,
        workers: int = _WORKERS,
        pinned: Mapping[tuple[str, int], int] | None = None,
        **more: Any,
    ) -> None:
        """Reserve a port for each server without starting anything."""
        shape = msgspec.structs.replace(shape or Shape(), housekeeping=_HOUSEKEEPING)
        super().__init__(folder, shape, **more)
        self.workers = workers
        self.pinned = dict(pinned or {})
        self._ports: list[PortHold] = [reserve() for _ in range(servers)]
        self._turns = itertools.count()

    async def close(self) -> None:
        """End everything and release the ports."""
        await super().close()
        for port in self._ports:
            port.release()

    async def prepare(self) -> None:
        """Set short retry delays, because the default policy would make the run too long."""
        await super().prepare()
        control = control_of(self.backend)
        for key in self.shape.keys:
            settings = await control.settings(key)
            policy = RetryPolicy(base=0.1, cap=0.3)
            await control.configure(key, settings.model_copy(update={"retry": policy}))

    async def link(self, role: str, number: int) -> FaultProxy:
        """Return a server's link to the store, or a client's link to the servers."""
        if role == "server":
            return await super().link(role, number)
        name = role, number
        if name not in self.links:
            self.links[name] = await FaultProxy(partial(self._server_for, name)).start()
        return self.links[name]

    def _server_for(self, name: tuple[str, int]) -> Address:
        number = self.pinned.get(name)
        if number is None:
            running = [a.number for a in self.cast.of("server") if a.alive and not a.frozen]
            number = running[next(self._turns) % len(running)] if running else 0
        return "127.0.0.1", self._ports[number].port

    async def environment(self, role: str, number: int) -> dict[str, str]:
        """Give servers the store's address, and all other processes an address that leads to the servers."""
        if role == "server":
            return {
                "TASKQUEUE_PORT": str(self._ports[number].port),
                "TASKQUEUE_LEASE": str(self.shape.lease),
                "TASKQUEUE_DRAIN": "1",
                **await super().environment(role, number),
            }
        _, port = (await self.link(role, number)).address
        return {"TASKQUEUE_SERVER_URL": f"http://127.0.0.1:{port}", **self.more}

    def setup(self, role: str, number: int) -> dict[str, Any]:
        """Make producers use the servers instead of the store."""
        word = {"word": "server"} if role == "producer" else {}
        return super().setup(role, number) | word

    async def begin(self) -> None:
        """Start the servers, then the workers and producers."""
        self.phase("load")
        for role, count in (
            ("server", len(self._ports)),
            ("worker", self.workers),
            ("producer", self.shape.producers if self.shape.tasks else 0),
        ):
            for number in range(count):
                await self.start(role, number)
            for actor in self.cast.of(role):
                if role != "worker":  # workers may be idle until a task is published
                    await self.present(actor)

    def active(self, actor: Actor) -> bool:
        """Return whether a server listens, a worker has started, or any other process has recorded an action."""
        if actor.role == "server":
            return actor.noted('"serving"') > 0
        if actor.role == "worker":  # a worker may have no task to execute yet
            return actor.noted("\n") > 0
        return super().active(actor)

    async def end(self) -> None:
        """Stop workers and producers, then the servers."""
        for role in ("worker", "producer", "server"):
            present = [actor for actor in self.cast.of(role) if actor.alive]
            await asyncio.gather(*(self.cast.stop(actor) for actor in present))

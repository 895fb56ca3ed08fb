"""How each kind of fault is carried out in a chaos run."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from typing import cast as cast_to

from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.rate_limit import RateLimit
from tests.chaos.cast import Actor
from tests.chaos.history import What
from tests.chaos.limiting import limit, pause, resume, swap
from tests.chaos.nemesis import Fault
from tests.redis.resp import RedisError

if TYPE_CHECKING:
    from tests.chaos.dispatching import Dispatching
    from tests.chaos.edges import Edges
    from tests.chaos.flowing import Flowing
    from tests.chaos.world import World

_DELAY = 0.02
_SLICE = 7
_HOUR = 3600.0
_DISCARD_PORT = 9
"""a port of this machine on which no server listens"""
_SQUEEZED = {"max_inflight": 2, "rate_limit": RateLimit(max_tokens=50)}
_SHARDS = 5
"""maximum number of shards"""
_RIGHTS = (("resetchannels", "&*"), ("-evalsha", "+evalsha"), ("-xreadgroup", "+xreadgroup"))
"""rights that Redis takes away and gives back"""
_RESTARTED = frozenset({"consumer", "producer", "worker", "server", "dispatcher", "gpu", "planner"})


class Afflictions:
    """Carries out the faults of one chaos run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.cut_off: set[tuple[str, int]] = set()
        self._one_at_a_time: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def _edges(self) -> Edges:
        return cast_to("Edges", self.world)

    async def inflict(self, fault: Fault) -> None:
        """Begin a fault, wait for its length and end it. Faults of the same target run one after the other."""
        whom = f"{fault.target} {fault.number}"
        async with self._one_at_a_time[whom]:
            await self._inflict(fault, whom)

    async def _inflict(self, fault: Fault, whom: str) -> None:
        self.world.log.note(What.FAULT, name=fault.name, target=whom)
        if fault.target == "redis":
            await self._redis(fault)
        elif fault.target == "queue":
            await self._queue(fault)
        elif fault.target == "migration":
            await cast_to("Flowing", self.world).migrate(fault.kind)
        elif fault.target.startswith("link-"):
            await self._link(fault, fault.target.removeprefix("link-"))
        else:
            await self._process(fault)
        self.world.log.note(What.HEALED, name=fault.name, target=whom)

    async def _redis(self, fault: Fault) -> None:
        redis = self.world.redis
        match fault.kind:
            case "kill":
                await asyncio.to_thread(redis.kill)
                await asyncio.sleep(fault.length)
                await asyncio.to_thread(redis.start)
                # Redis cannot survive another kill until its append-only file is complete.
                await self.world.until(redis.whole, "its append-only file is whole")
            case "freeze":
                redis.freeze()
                try:
                    await asyncio.sleep(fault.length)
                finally:
                    redis.thaw()
            case "pause":
                await self._call("CLIENT", "PAUSE", round(fault.length * 1000), "WRITE")
                await asyncio.sleep(fault.length)
            case "forget":
                await self._call("SCRIPT", "FLUSH")
            case "fill":
                async with self._configured("maxmemory", "1", "0"):
                    await asyncio.sleep(fault.length)
            case "idle":
                async with self._configured("timeout", "1", "0"):
                    await asyncio.sleep(fault.length)
            case _:
                await self._world_of_redis(fault)

    async def _world_of_redis(self, fault: Fault) -> None:
        """Change what Redis depends on: rights, passwords, replicas or the clock."""
        redis = self.world.redis
        match fault.kind:
            case "deny":
                away, back = _RIGHTS[round(fault.start * 1000) % len(_RIGHTS)]
                await self._call("ACL", "SETUSER", "default", away)
                await asyncio.sleep(fault.length)
                await self._call("ACL", "SETUSER", "default", back)
            case "lock":
                await self._call("ACL", "SETUSER", "default", "resetpass", ">another")
                redis.login = ("default", "another")
                await self._call("CLIENT", "KILL", "TYPE", "normal")
                await self._call("CLIENT", "KILL", "TYPE", "pubsub")
                await asyncio.sleep(fault.length)
                await self._call("ACL", "SETUSER", "default", "nopass")
                redis.login = None
            case "unreplicate":
                async with self._configured("min-replicas-to-write", "1", "0"):
                    await asyncio.sleep(fault.length)
            case "demote":
                await self._call("REPLICAOF", "127.0.0.1", _DISCARD_PORT)
                await asyncio.sleep(fault.length)
                await self._call("REPLICAOF", "NO", "ONE")
            case "rotate":
                await self._edges.rotate(fault.length)
            case "skew":
                self._edges.clock.set(-_HOUR)
                await asyncio.sleep(fault.length)
                self._edges.clock.set(0.0)
            case _:
                raise ValueError(f"Redis cannot be hit by {fault.kind}")

    @asynccontextmanager
    async def _configured(self, name: str, value: str, back: str) -> AsyncIterator[None]:
        await self._call("CONFIG", "SET", name, value)
        try:
            yield
        finally:
            await self._call("CONFIG", "SET", name, back)

    async def _call(self, *words: str | int) -> None:
        # Redis may be down; then the fault has no effect.
        with contextlib.suppress(OSError, RedisError):
            await asyncio.to_thread(self.world.redis.call, *words)

    async def _queue(self, fault: Fault) -> None:
        shape = self.world.shape
        key = shape.keys[fault.number]
        match fault.kind:
            case "pause":
                await pause(self.world, key)
                await asyncio.sleep(fault.length)
                await resume(self.world, key)
            case "squeeze":
                await limit(self.world, key, **_SQUEEZED)
                await asyncio.sleep(fault.length)
                usual = {"max_inflight": None, "rate_limit": None, **shape.limits.get(key, {})}
                await limit(self.world, key, **usual)
            case "swap":
                await swap(self.world, key)
                await asyncio.sleep(fault.length)
                await swap(self.world, key)
                await limit(self.world, key, **shape.limits.get(key, {}))
            case "damage":
                await self._edges.damage(key)
            case "reshard":
                number = 1 + round(fault.start * 1000) % _SHARDS
                await limit(self.world, key, shards=number)
            case "redrive" | "discard":
                flowing = cast_to("Flowing", self.world)
                with contextlib.suppress(BackendUnavailable):
                    await flowing.settle_dead(key, discard=fault.kind == "discard")
            case _:
                raise ValueError(f"a queue cannot be hit by {fault.kind}")

    async def _process(self, fault: Fault) -> None:
        cast = self.world.cast
        actor = cast.actors[fault.target, fault.number]
        if not actor.alive:
            return
        match fault.kind:
            case "kill":
                await cast.kill(actor)
                await asyncio.sleep(fault.length)
                await self._restart(actor)
            case "stop":
                await cast.stop(actor)
                await asyncio.sleep(fault.length)
                await self._restart(actor)
            case "freeze":
                cast.freeze(actor)
                await asyncio.sleep(fault.length)
                cast.thaw(actor)
            case _:
                world = cast_to("Dispatching", self.world)
                world.misbehave(actor.number, fault.kind)
                await asyncio.sleep(fault.length)
                world.misbehave(actor.number, "")

    async def _restart(self, actor: Actor) -> None:
        if actor.role in _RESTARTED:
            await self.world.start(actor.role, actor.number)
            fresh = self.world.cast.actors[actor.role, actor.number]
            if (actor.role, actor.number) in self.cut_off:
                self.world.log.note(What.CUT, target=fresh.name)
            await self.world.present(fresh)

    async def _link(self, fault: Fault, role: str) -> None:
        link = await self.world.link(role, fault.number)
        match fault.kind:
            case "cut":
                link.cut()
            case "lose":
                link.lose_replies(1, after=b"EVALSHA")
            case "block" | "deafen":
                link.block(up=fault.kind == "block")
                await self._apart(role, fault)
                link.heal()
            case "slow":
                link.delay(_DELAY)
                await asyncio.sleep(fault.length)
                link.heal()
            case "slice":
                link.slice(_SLICE)
                await asyncio.sleep(fault.length)
                link.heal()
            case _:
                raise ValueError(f"a link cannot be hit by {fault.kind}")

    async def _apart(self, role: str, fault: Fault) -> None:
        whom = role, fault.number
        self.cut_off.add(whom)
        actors = self.world.cast.actors
        if whom in actors:
            self.world.log.note(What.CUT, target=actors[whom].name)
        await asyncio.sleep(fault.length)
        self.cut_off.discard(whom)
        for actor in self.world.cast.all:
            if (actor.role, actor.number) == whom:
                self.world.log.note(What.MENDED, target=actor.name)

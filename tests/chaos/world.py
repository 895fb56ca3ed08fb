"""One run: a real Redis, processes that use it, faults; then the end of all tasks, and the checker's verdict."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import msgspec
from pydantic import SecretStr

from taskqueue_core.backend import Backend, Subscription
from taskqueue_core.capabilities import Control, control_of, dead_letters_of
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.tasks import Confirmation, Received, Task
from taskqueue_redis import RedisBackend, RedisSettings
from tests.chaos.afflictions import Afflictions
from tests.chaos.cast import Actor, Cast
from tests.chaos.checker import Verdict, check
from tests.chaos.dumping import dead_ids, ledgers_of, live, take_dump
from tests.chaos.history import Event, Log, What, merge, read
from tests.chaos.limiting import limit
from tests.chaos.nemesis import Fault, unleash
from tests.chaos.programs.common import Setup
from tests.chaos.programs.producer import Producer
from tests.chaos.proxy import Address, FaultProxy
from tests.chaos.story import Dump, Terms
from tests.redis.engines import Engine, find_engine
from tests.redis.servers import RedisServer

KEYS = ("alpha", "beta", "gamma")
CONFIG = {"appendfsync": "no"}
"""While a sync goes on Redis answers before it writes: a kill then says something about this machine's disk alone."""
_PREFIX = "chaos"
_TICK = 0.02
_BATCH = 20


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """How large a run is, and the bounds that it sets."""

    consumers: int = 2
    producers: int = 2
    tasks: int = 3000
    """of all producers together"""
    seconds: float = 2.0
    """over which they are published, without faults"""
    keys: tuple[str, ...] = KEYS
    lease: float = 2.0
    housekeeping: float = 0.4
    answer_timeout: float = 0.8
    operation_timeout: float = 1.6
    hold: float = 0.02
    limit: int = 100
    take: int = 25
    simple: bool = False
    entities: int = 0
    keyed: bool = False
    tenants: int = 0
    priorities: tuple[int, ...] = (5, 5, 5, 8)
    hanging: tuple[str, ...] = ()
    limits: Mapping[str, Mapping[str, Any]] = {}
    """settings that limit or order the flow, by key"""
    liveness: float = 30.0
    journal: bool = False
    """whether the queues note what happens in the store's journal"""
    terms: Terms | None = None
    """in place of those that follow from the rest"""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a run left behind."""

    events: list[Event]
    dump: Dump
    verdict: Verdict
    wall: float


class World:
    """Use it as a context: entering starts Redis and its links, leaving ends everything."""

    def __init__(
        self, folder: Path, shape: Shape | None = None, *, seed: int = 0, engine: Engine | None = None,
        redis: RedisServer | None = None, env: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Start nothing yet. ``env`` goes to every process; ``redis`` is used in place of a server of its own."""
        self.folder = folder
        self.shape = shape or Shape()
        self.seed = seed
        folder.mkdir(parents=True, exist_ok=True)
        self.log = Log(folder / "world.jsonl", "world")
        engine = engine or find_engine()
        self.redis = redis or RedisServer(engine, folder / "redis", config=CONFIG)
        self.cast = Cast(folder, self.log)
        self.links: dict[tuple[str, int], FaultProxy] = {}
        self.terms = self.shape.terms or Terms(lease=self.shape.lease, liveness=self.shape.liveness)
        self.more = dict(env or {})
        self.backend: Backend
        """one that no fault of a link touches"""
        self._backends: list[Backend] = []
        self._afflictions = Afflictions(self)
        self.identity = ""
        """the worker's name of all consumers; else each has its own"""
        self._began = time.monotonic()

    # The stage

    async def __aenter__(self) -> Self:
        try:
            await self.raise_store()
            self.backend = self.open_backend(self.redis.port)
            await self.prepare()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End every process, then close what is this one's."""
        await self.cast.close()
        for link in self.links.values():
            await link.aclose()
        self.redis.thaw()
        for backend in self._backends:
            with contextlib.suppress(BackendUnavailable):
                await backend.aclose()
        await self.lower_store()
        self.log.close()

    async def raise_store(self) -> None:
        """Start Redis."""
        await asyncio.to_thread(self.redis.start)

    async def lower_store(self) -> None:
        """End Redis."""
        await asyncio.to_thread(self.redis.close)

    def open_backend(self, port: int, *, url: str = "") -> Backend:
        """Make a backend of this process, closed with the world: at Redis itself, or at a link."""
        shape = self.shape
        settings = RedisSettings(
            url=SecretStr(url or f"redis://127.0.0.1:{port}"),
            prefix=_PREFIX,
            lease=shape.lease,
            housekeeping=shape.housekeeping,
            answer_timeout=shape.answer_timeout,
            operation_timeout=shape.operation_timeout,
            _env_file=None,
        )
        backend = RedisBackend(settings=settings)
        self._backends.append(backend)
        return backend

    async def prepare(self) -> None:
        """Set the queues up: what a run forgets, it cannot check."""
        control = control_of(self.backend)
        for key in self.shape.keys:
            settings = await control.settings(key)
            kept = {"max_losses": 20, "dedupe_window": 3600.0}  # an outage may last five minutes
            kept["journal"] = self.shape.journal
            await control.configure(key, settings.model_copy(update=kept))
            self.log.note(What.SETTINGS, key=key, name="max_losses", value=20)
            if limits := self.shape.limits.get(key):
                await limit(self, key, **limits)

    def target(self) -> Address:
        """Where links lead."""
        return "127.0.0.1", self.redis.port

    async def link(self, role: str, number: int) -> FaultProxy:
        """Return the link of a process to the store, opened at its first use."""
        name = role, number
        if name not in self.links:
            self.links[name] = await FaultProxy(self.target, seed=self.seed).start()
        return self.links[name]

    async def environment(self, role: str, number: int) -> dict[str, str]:
        """Return the variables that lead a process to the store, by its link."""
        _, port = (await self.link(role, number)).address
        shape = self.shape
        return {
            "TASKQUEUE_REDIS_URL": f"redis://127.0.0.1:{port}",
            "TASKQUEUE_REDIS_PREFIX": _PREFIX,
            "TASKQUEUE_REDIS_LEASE": str(shape.lease),
            "TASKQUEUE_REDIS_HOUSEKEEPING": str(shape.housekeeping),
            "TASKQUEUE_REDIS_ANSWER_TIMEOUT": str(shape.answer_timeout),
            "TASKQUEUE_REDIS_OPERATION_TIMEOUT": str(shape.operation_timeout),
            "TASKQUEUE_REDIS_CONNECT_TIMEOUT": "0.5",
            **self.more,
        }

    # The players

    def setup(self, role: str, number: int) -> dict[str, Any]:
        """Return what a process is told."""
        shape = self.shape
        common = {"seed": self.seed, "keys": shape.keys, "hold": shape.hold}
        if role == "producer":
            share = shape.tasks // shape.producers
            return common | {
                "tasks": share,
                "batch": _BATCH,
                "pace": shape.seconds * _BATCH / share,
                "simple": shape.simple,
                "entities": shape.entities,
                "keyed": shape.keyed,
                "tenants": shape.tenants,
                "priorities": shape.priorities,
                "hanging": shape.hanging,
                "before": self.cast.logs(role, number),
            }
        return common | {
            "identity": self.identity or f"c{number}",
            "limit": shape.limit,
            "take": shape.take,
            "housekeeping": shape.housekeeping,
        }

    async def start(self, role: str, number: int) -> None:
        """Start a process, or the next start of one that has ended."""
        env = await self.environment(role, number)
        self.cast.start(role, number, env, self.setup(role, number))

    async def begin(self) -> None:
        """Start everybody, and wait until each has done something."""
        self.phase("load")
        for number in range(self.shape.consumers):
            await self.start("consumer", number)
        for number in range(self.shape.producers if self.shape.tasks else 0):
            await self.start("producer", number)
        for actor in self.cast.all:
            await self.present(actor)

    async def present(self, actor: Actor) -> None:
        """Wait until a process has done something, or has ended already."""
        await self.until(
            lambda: not actor.alive or self.active(actor), f"{actor.name} does something"
        )

    def active(self, actor: Actor) -> bool:
        """Whether a process has done something since it started."""
        return actor.noted("\n") > 1

    def held_by(self, role: str, number: int) -> int:
        """Return how many deliveries a consumer, or server, has in hand, by its own log."""
        delivered: set[str] = set()
        settled: set[str] = set()
        log = self.cast.actors[role, number].log
        for event in read(log) if log.exists() else ():
            if event.what in {What.DELIVERED, What.ADOPTED}:
                delivered.add(event.receipt)
            elif event.what is What.SETTLE:
                settled.add(event.receipt)
        return len(delivered - settled)

    async def holding(self, role: str, number: int, count: int) -> None:
        """Wait until somebody has so many deliveries in hand."""
        await self.until(
            lambda: self.held_by(role, number) >= count, f"{role} {number} holds {count}"
        )

    # The acts

    async def run(self, faults: Iterable[Fault] = ()) -> Outcome:
        """Play all acts: load, faults, heal, quiesce, and the verdict."""
        await self.begin()
        self.phase("faults")
        await unleash(faults, self._afflictions.inflict)
        return await self.finish()

    async def inflict(self, kind: str, target: str, number: int = 0, length: float = 0.0) -> None:
        """Inflict one fault now, and wait until it is over."""
        await self._afflictions.inflict(Fault(kind, target, number, 0.0, length))

    async def finish(self) -> Outcome:
        """Heal everything, wait for the end of all tasks, and check."""
        await self.heal()
        await self.quiesce()
        return await self.judge()

    async def heal(self) -> None:
        """End every fault."""
        for link in self.links.values():
            link.heal()
        for actor in self.cast.all:
            self.cast.thaw(actor)
        self.phase("heal")

    async def quiesce(self) -> None:
        """Wait until everything is published and has ended; dead letters are redriven once."""
        end = asyncio.get_running_loop().time() + self.terms.liveness
        self.phase("quiesce")
        for actor in self.cast.of("producer"):
            await self.cast.ended(actor, seconds=self.terms.liveness)
        await self._drained(end)
        for key in self.shape.keys:
            if await dead_ids(self.backend, key):
                self.log.note(What.REDRIVE, key=key)
                await dead_letters_of(self.backend).redrive(key)
        await self._drained(end)
        self.phase("done")

    async def _drained(self, end: float) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < end:
            with contextlib.suppress(BackendUnavailable):
                if not live(await ledgers_of(self.backend, self.shape.keys)):
                    return
            self.cast.check()
            await asyncio.sleep(_TICK)

    async def judge(self) -> Outcome:
        """Ask the store, end everybody in order, and let the checker speak."""
        await self.end()
        self.cast.inspect()
        events = merge(self.folder.glob("*.jsonl"))
        dump = await take_dump(self.backend, self.shape.keys, events)
        verdict = check(events, dump, self.terms)
        return Outcome(
            events=events, dump=dump, verdict=verdict, wall=time.monotonic() - self._began
        )

    async def end(self) -> None:
        """Ask everybody to end."""
        await asyncio.gather(*(self.cast.stop(a) for a in self.cast.all if a.alive))

    # What a case does by itself

    @property
    def control(self) -> Control:
        """The operator's side of this process's backend."""
        return control_of(self.backend)

    def subscribe(self, identity: str) -> Subscription:
        """Open a subscription of this process, to all queues."""
        return self.backend.subscribe(self.shape.keys, identity)

    async def publish(self, count: int, **fields: Any) -> tuple[Confirmation, ...]:
        """Publish tasks that are to be acked at once, to the first queue."""
        setup = Setup(role="producer", name="world", log="", keys=self.shape.keys[:1])
        producer = Producer(setup, self.log, self.backend, asyncio.Event())
        answers: list[Confirmation] = []
        while len(answers) < count:
            size = min(500, count - len(answers))
            body = {"will": "ack", "padding": ""}
            tasks = [Task.of(self.shape.keys[0], body, **fields) for _ in range(size)]
            answers += await producer.publish_once(tasks)
        return tuple(answers)

    async def receive(self, subscription: Subscription, limit: int) -> Received:
        """Receive until something comes, and do the housekeeping meanwhile."""
        while True:
            received = await subscription.receive(limit, self.shape.housekeeping)
            if received.deliveries:
                return received
            await self.control.maintain()

    def published(self) -> int:
        """Return how many tasks have been confirmed so far."""
        producers = (actor for actor in self.cast.all if actor.role == "producer")
        return sum(actor.noted('"outcome":"accepted"') for actor in producers)

    async def drained(self, seconds: float = 20.0) -> None:
        """Wait until nothing is alive in any queue."""

        async def empty() -> bool:
            return not live(await ledgers_of(self.backend, self.shape.keys))

        await self.until(empty, "every task has ended", seconds=seconds)

    # Small things

    def phase(self, name: str) -> None:
        """Note that an act begins."""
        self.log.note(What.PHASE, name=name)

    async def until(
        self, condition: Callable[[], bool | Awaitable[bool]], what: str, *, seconds: float = 20.0
    ) -> None:
        """Wait for a condition."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while True:
            found = condition()
            if found if isinstance(found, bool) else await found:
                return
            if loop.time() > end:
                self.cast.check()
                raise TimeoutError(f"not within {seconds:g} s: {what}")
            await asyncio.sleep(_TICK)

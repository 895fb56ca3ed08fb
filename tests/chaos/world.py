"""One chaos run: a real Redis, processes that use it, faults, then the end of all tasks and the checker's verdict."""

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
CONFIG = {"appendfsync": "always"}
"""Redis settings: with ``always``, Redis writes to its file before it answers. With the other values it may answer
first, so a kill can undo what it has answered."""
_PREFIX = "chaos"
_TICK = 0.02
_BATCH = 20


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Size and time limits of a run."""

    consumers: int = 2
    producers: int = 2
    tasks: int = 3000
    """number of tasks of all producers together"""
    seconds: float = 2.0
    """seconds over which the tasks are published if there are no faults"""
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
    large: float = 0.0
    """share of the tasks whose payload has nearly the largest size"""
    limits: Mapping[str, Mapping[str, Any]] = {}
    """limits and order settings, by queue key"""
    liveness: float = 30.0
    journal: bool = False
    """whether the queues record their state changes in the store's journal"""
    terms: Terms | None = None
    """terms for the checker; by default derived from the lease and the liveness"""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run: its events, the final state of the store, and the verdict."""

    events: list[Event]
    dump: Dump
    verdict: Verdict
    wall: float


class World:
    """A chaos run as an async context manager: entering starts Redis and its links, leaving ends everything."""

    def __init__(
        self, folder: Path, shape: Shape | None = None, *, seed: int = 0, engine: Engine | None = None,
        redis: RedisServer | None = None, env: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Prepare the run. ``env`` is passed to every process; ``redis`` is used instead of a new server."""
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
        self.credentials: dict[str, Any] = {}
        self.backend: Backend
        """backend of this process, connected without a breakable link"""
        self._backends: list[Backend] = []
        self._afflictions = Afflictions(self)
        self.identity = ""
        """worker name that all consumers share; if empty, each consumer has its own"""
        self._began = time.monotonic()

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
        """End all processes, then close the links, the backends and the store."""
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
        """Stop Redis."""
        await asyncio.to_thread(self.redis.close)

    def open_backend(self, port: int, *, url: str = "") -> Backend:
        """Open a backend of this process, closed with the run; ``port`` is that of Redis or of a link."""
        shape = self.shape
        settings = RedisSettings(
            url=SecretStr(url or f"redis://127.0.0.1:{port}"),
            prefix=_PREFIX,
            lease=shape.lease,
            housekeeping=shape.housekeeping,
            answer_timeout=shape.answer_timeout,
            operation_timeout=shape.operation_timeout,
            _env_file=None,
            **self.credentials,
        )
        backend = RedisBackend(settings=settings)
        self._backends.append(backend)
        return backend

    async def prepare(self) -> None:
        """Configure the queues so that the store forgets no task before the checker has read it."""
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
        """Return the address to which links connect."""
        return "127.0.0.1", self.redis.port

    async def link(self, role: str, number: int) -> FaultProxy:
        """Return the link between a process and the store; it is opened at its first use."""
        name = role, number
        if name not in self.links:
            self.links[name] = await FaultProxy(self.target, seed=self.seed).start()
        return self.links[name]

    async def environment(self, role: str, number: int) -> dict[str, str]:
        """Return the environment variables that make a process use the store through its link."""
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

    def setup(self, role: str, number: int) -> dict[str, Any]:
        """Return the settings of a process."""
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
                "large": shape.large,
                "before": self.cast.logs(role, number),
            }
        return common | {
            "identity": self.identity or f"c{number}",
            "limit": shape.limit,
            "take": shape.take,
            "housekeeping": shape.housekeeping,
        }

    async def start(self, role: str, number: int) -> None:
        """Start a process, possibly again after it has ended."""
        env = await self.environment(role, number)
        self.cast.start(role, number, env, self.setup(role, number))

    async def begin(self) -> None:
        """Start the consumers, then the producers; wait until each has done something.

        Producers publish for a limited time, which must not pass while a consumer is still starting.
        """
        self.phase("load")
        for role, count in (
            ("consumer", self.shape.consumers),
            ("producer", self.shape.producers if self.shape.tasks else 0),
        ):
            for number in range(count):
                await self.start(role, number)
            for actor in self.cast.of(role):
                await self.present(actor)

    async def present(self, actor: Actor) -> None:
        """Wait until a process has done something or has ended."""
        await self.until(
            lambda: not actor.alive or self.active(actor),
            f"{actor.name} does something",
            seconds=60.0,
        )

    def active(self, actor: Actor) -> bool:
        """Return whether a process has done something since it started."""
        return actor.noted("\n") > 1

    def held_by(self, role: str, number: int) -> int:
        """Return how many deliveries a consumer or server holds, according to its own log."""
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
        """Wait until a consumer or server holds at least ``count`` deliveries."""
        await self.until(
            lambda: self.held_by(role, number) >= count, f"{role} {number} holds {count}"
        )

    async def run(self, faults: Iterable[Fault] = ()) -> Outcome:
        """Execute all phases: load, faults, heal, quiesce, and the verdict."""
        await self.begin()
        self.phase("faults")
        await unleash(faults, self._afflictions.inflict)
        return await self.finish()

    async def inflict(self, kind: str, target: str, number: int = 0, length: float = 0.0) -> None:
        """Inflict one fault now, and wait until it is over."""
        await self._afflictions.inflict(Fault(kind, target, number, 0.0, length))

    async def finish(self) -> Outcome:
        """End all faults, wait until all tasks have ended, and check the run."""
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
        """End all processes, read the final state of the store, and run the checker."""
        await self.end()
        self.cast.inspect()
        events = merge(self.folder.glob("*.jsonl"))
        dump = await take_dump(self.backend, self.shape.keys, events)
        verdict = check(events, dump, self.terms)
        return Outcome(
            events=events, dump=dump, verdict=verdict, wall=time.monotonic() - self._began
        )

    async def end(self) -> None:
        """Stop all processes that are still running."""
        await asyncio.gather(*(self.cast.stop(a) for a in self.cast.all if a.alive))

    @property
    def control(self) -> Control:
        """The control capability of this process's backend."""
        return control_of(self.backend)

    def subscribe(self, identity: str) -> Subscription:
        """Open a subscription of this process to all queues."""
        return self.backend.subscribe(self.shape.keys, identity)

    async def publish(self, count: int, **fields: Any) -> tuple[Confirmation, ...]:
        """Publish ``count`` tasks, which are to be acked at once, to the first queue."""
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
        """Receive until there is a delivery, and run maintenance meanwhile."""
        while True:
            received = await subscription.receive(limit, self.shape.housekeeping)
            if received.deliveries:
                return received
            await self.control.maintain()

    def published(self) -> int:
        """Return the number of tasks accepted so far."""
        producers = (actor for actor in self.cast.all if actor.role == "producer")
        return sum(actor.noted('"outcome":"accepted"') for actor in producers)

    async def drained(self, seconds: float = 20.0) -> None:
        """Wait until no queue has a live task."""

        async def empty() -> bool:
            return not live(await ledgers_of(self.backend, self.shape.keys))

        await self.until(empty, "every task has ended", seconds=seconds)

    def phase(self, name: str) -> None:
        """Record the beginning of a phase."""
        self.log.note(What.PHASE, name=name)

    async def until(
        self, condition: Callable[[], bool | Awaitable[bool]], what: str, *, seconds: float = 20.0
    ) -> None:
        """Wait for a condition; raise `TimeoutError`, naming ``what``, if it is not met in time."""
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

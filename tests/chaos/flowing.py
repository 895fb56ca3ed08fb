"""Chaos runs of workflows and schedules, with servers, workers and publishers in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from taskqueue_core import migration
from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import StoredSchedule, control_of, dead_letters_of, schedules_of
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.migration import MigratingBackend, MigrationMode
from taskqueue_core.schedules import Every, Schedule, Spec, TaskTemplate, scheduled_task
from taskqueue_core.sharding.backend import ShardedBackend
from taskqueue_core.workflows import WORKFLOWS
from tests.chaos.cast import Actor
from tests.chaos.dumping import dead_ids, ledgers_of, live
from tests.chaos.history import What
from tests.chaos.limiting import limit
from tests.chaos.nemesis import Fault, unleash
from tests.chaos.points import Points
from tests.chaos.replicas import Replicas
from tests.chaos.world import CONFIG, Outcome, Shape
from tests.chaos.zones import Passage
from tests.redis.clocks import WallClock
from tests.redis.engines import find_engine
from tests.redis.servers import RedisServer

SCHEDULED = "delta"
"""a queue that gets tasks of schedules only"""
_KEYS = ("alpha", "beta", "gamma")
_PARTITIONS = 4
_SERVERS = 3
_PLANNERS = 2
_WORKFLOWS = 16
"""number of workflows of each planner"""
_SCHEDULES = 8
_SECONDS = 7
"""seconds from the first instant of the schedules to their end"""
_ROOM = 2
"""number of fresh tasks for which the queue of schedules has room while it is kept full"""
_HOUR = 3600.0
_WEEK = 168 * _HOUR
_MOVING = frozenset({"shards", "migration"})
"""runs in which schedules move between queues or stores"""
_STEPS = {"adding": "thread", "process": "process"}
"""where the steps run that add steps, in runs that have such"""
_TICK = 0.05
_PATIENCE = 3.0
"""seconds for which a fault waits until a process comes to its point"""


class Flowing(Replicas):
    """A run with workflows and schedules on three servers. ``menu`` says which faults it gets, and so what it needs."""

    def __init__(self, folder: Path, shape: Shape | None = None, *, menu: str, **more: Any) -> None:
        """Prepare the run without starting anything."""
        shape = msgspec.structs.replace(
            shape or Shape(), keys=(*_KEYS, SCHEDULED), producers=0, tasks=0, liveness=60.0
        )
        super().__init__(folder, shape, servers=_SERVERS, **more)
        self.shape = msgspec.structs.replace(self.shape, housekeeping=0.4)
        self.more["TASKQUEUE_REDIS_PARTITIONS"] = str(_PARTITIONS)
        self.credentials["partitions"] = _PARTITIONS
        self.points = Points(folder)
        self._at_point: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.menu = menu
        if menu == "process":
            self.cast.excused = ("ChildProcessEnded",)
        self._new: RedisServer | None = None
        """the store to which the run migrates"""
        if menu == "migration":
            self._new = RedisServer(find_engine(), folder / "new", config=CONFIG)
        self._promised: defaultdict[str, list[str]] = defaultdict(list)
        self._schedules: list[Schedule] = []
        self._clock = WallClock(folder) if menu == "clock" else None
        if self._clock is not None:
            self._clock.set(_HOUR if self.seed % 2 else -_HOUR)
        self._passage = Passage(folder, self.redis, self.seed) if menu == "zones" else None
        self._passing: asyncio.Task[None] | None = None

    async def raise_store(self) -> None:
        """Start Redis, and the one to which the run migrates."""
        await super().raise_store()
        if self._new is not None:
            await asyncio.to_thread(self._new.start)

    async def lower_store(self) -> None:
        """Stop them."""
        await super().lower_store()
        if self._new is not None:
            await asyncio.to_thread(self._new.close)

    def open_backend(self, port: int, *, url: str = "") -> Backend:
        """Open a backend that knows shards, or both sides of the migration, if the run has them."""
        stored = super().open_backend(port, url=url)
        if self.menu == "shards":
            return ShardedBackend(stored)
        if self._new is not None:
            new = super().open_backend(self._new.port)
            return MigratingBackend(stored, new, mode=self._mode)
        return stored

    @property
    def _mode(self) -> MigrationMode:
        return tuple(MigrationMode)[self.seed % len(MigrationMode)]

    @property
    def _sides(self) -> tuple[Backend, ...]:
        if isinstance(self.backend, MigratingBackend):
            return tuple(side.backend for side in self.backend.members)
        return (self.backend,)

    async def prepare(self) -> None:
        """Remember what has ended for as long as the clock of the store passes in the run."""
        await super().prepare()
        for key in (*self.shape.keys, WORKFLOWS) if self._passage is not None else ():
            await limit(self, key, dedupe_window=_WEEK, result_ttl=_WEEK)

    async def migrate(self, kind: str) -> None:
        """Start the migration, or go back."""
        assert isinstance(self.backend, MigratingBackend)
        await (migration.start if kind == "start" else migration.rollback)(self.backend)

    async def environment(self, role: str, number: int) -> dict[str, str]:
        """Let planner 0 use the store itself, and let one server have a wrong clock."""
        if role == "planner" and number == 0:
            role = "server"
        found = await super().environment(role, number)
        if role == "server" and number == 1 and self._clock is not None:
            found |= self._clock.environment
        if role == "server" and self.menu == "shards":
            found["TASKQUEUE_SHARDING"] = "true"
        if role == "server" and self._new is not None:
            found |= {
                name.replace("TASKQUEUE_REDIS", "TASKQUEUE_OLD_REDIS"): value
                for name, value in found.items()
                if name.startswith("TASKQUEUE_REDIS")
            }
            found["TASKQUEUE_REDIS_URL"] = self._new.url
            found["TASKQUEUE_MIGRATE_FROM"] = "redis"
            found["TASKQUEUE_MIGRATE_MODE"] = self._mode.value
        return found

    def setup(self, role: str, number: int) -> dict[str, Any]:
        """Return the settings of a process."""
        found = super().setup(role, number) | {"pointed": role == "server"}
        found["polls"] = self._passage is not None
        found["steps"] = _STEPS.get(self.menu, "")
        if role == "planner":
            found |= {
                "keys": _KEYS,
                "tasks": _WORKFLOWS,
                "pace": self.shape.seconds / _WORKFLOWS,
                "word": "server" if number else "redis",
                "before": self.cast.logs(role, number),
            }
        return found

    def active(self, actor: Actor) -> bool:
        """Return whether a planner has published, or any other process does what it is for."""
        return actor.noted("\n") > 1 if actor.role == "planner" else super().active(actor)

    async def begin(self) -> None:
        """Start the servers and workers, then the planners; then put the schedules."""
        await super().begin()
        if self.menu == "full":
            await limit(self, SCHEDULED, capacity=_ROOM)
        for number in range(_PLANNERS):
            await self.start("planner", number)
        for actor in self.cast.of("planner"):
            await self.present(actor)
        await self._put_schedules()
        if self._passage is not None:
            self._passing = asyncio.create_task(self._passage.begin())

    def _planned(self) -> Iterator[tuple[Schedule, list[float]]]:
        """Yield the schedules of the run, each with its instants."""
        if self._passage is not None:
            yield from self._passage.schedules(SCHEDULED)
            return
        start = float(int(self.backend.now()) + 1)
        end = datetime.fromtimestamp(start + _SECONDS, UTC)
        for number in range(_SCHEDULES):
            key = SCHEDULED if number % 2 else _KEYS[0]
            every = 1 + number % 3
            schedule = Schedule(
                f"every-{number}",
                Every(every, since=datetime.fromtimestamp(start, UTC)),
                TaskTemplate.of(key, {"will": "ack", "padding": ""}),
                catch_up="all",
                overlap="allow",
                ends=end,
            )
            yield schedule, [start + second for second in range(0, _SECONDS, every)]

    async def _put_schedules(self) -> None:
        for schedule, instants in self._planned():
            self._schedules.append(schedule)
            for instant in instants:
                self._promise(schedule, instant)
            spec = Spec(schedule=schedule).encode()
            stored = StoredSchedule(
                key=schedule.task.key, name=schedule.name, spec=spec, next_at=instants[0]
            )
            await schedules_of(self.backend).put(stored)

    def _promise(self, schedule: Schedule, instant: float) -> None:
        """Record the publish of the task of an instant, which the store has promised."""
        task = scheduled_task(schedule, instant)
        call = self.log.next_call()
        told = {"key": task.key, "task": task.id, "call": call}
        self._promised[task.key].append(task.id)
        self.log.note(What.PUBLISH, not_before=instant, origin="schedule", **told)
        self.log.note(What.PUBLISHED, outcome="accepted", **told)

    async def run(self, faults: Iterable[Fault] = ()) -> Outcome:
        """Execute all phases. Faults that wait for a point are given up when the load is over."""
        await self.begin()
        self.phase("faults")
        await unleash(faults, self.afflict)
        return await self.finish()

    async def afflict(self, fault: Fault) -> None:
        """Inflict a fault at its time, or when a process comes to its point."""
        if not fault.point:
            await self._afflictions.inflict(fault)
            return
        async with self._at_point[fault.point]:
            hit = await self._strike(fault)
        if hit is not None:  # others may wait for the same point while the process is started again
            await self._afflictions.inflict(hit)

    async def _strike(self, fault: Fault) -> Fault | None:
        """Wait until a process is at the point of a fault, and kill Redis or a child process, or return its fault."""
        self.points.arm(fault.point)
        with contextlib.suppress(TimeoutError):
            await self.until(
                lambda: bool(self.points.reached_by(fault.point)), fault.point, seconds=_PATIENCE
            )
        self.points.disarm(fault.point)
        name = self.points.reached_by(fault.point)
        role, _, number = name.partition(".")[0].rpartition("-")
        if name and fault.target == "child":
            with contextlib.suppress(OSError):  # it has died with its worker
                os.kill(int(name.rpartition(".")[2]), signal.SIGKILL)
            self.log.note(What.FAULT, name=fault.name, target=name)
            self.log.note(What.HEALED, name=fault.name, target=name)
        if name and fault.target == "redis":
            await self._afflictions.inflict(fault)
            self.points.leave(fault.point)
        if not name or fault.target in {"redis", "child"}:
            return None
        return msgspec.structs.replace(fault, target=role, number=int(number))

    async def quiesce(self) -> None:
        """Wait until everything is published and has ended. What dead letters hold is released or cancelled."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.terms.liveness
        self.phase("quiesce")
        if self.menu == "full":
            await limit(self, SCHEDULED, capacity=None)
        for actor in self.cast.of("planner"):
            await self.cast.ended(actor, seconds=self.terms.liveness)
        if self._new is not None:
            await self.migrate("start")
        if self._passing is not None:
            await self._passing
        while loop.time() < end and not await self._over():
            self.cast.check()
            await asyncio.sleep(_TICK)
        self.phase("done")

    async def _over(self) -> bool:
        with contextlib.suppress(BackendUnavailable):
            ledgers = await ledgers_of(self.backend, (*self.shape.keys, WORKFLOWS))
            dead = any([await self.settle_dead(key) for key in self.shape.keys])
            waiting = await asyncio.gather(
                *(schedules_of(self.backend).get(one.name) for one in self._schedules)
            )
            fired = all(one is not None and one.next_at is None for one in waiting)
            return fired and not dead and not live(ledgers)
        return False

    async def settle_dead(self, key: str, *, discard: bool = False) -> bool:
        """Redrive or discard the dead letters of a queue; return whether there were any."""
        letters = dead_letters_of(self.backend)
        found = await dead_ids(self.backend, key)
        for task in found:
            self.log.note(What.DISCARD if discard else What.REDRIVE, key=key, task=task)
            await (letters.discard if discard else letters.redrive)(key, task)
        return bool(found)

    async def judge(self) -> Outcome:
        """Record what the store knows of each instant, then run the checker."""
        for schedule in self._schedules if self.menu not in _MOVING else ():
            stored = await schedules_of(self.backend).get(schedule.name)
            for one in () if stored is None else stored.recent:
                task = scheduled_task(schedule, one.instant).id
                self.log.note(
                    What.FIRED,
                    key=schedule.task.key,
                    task=task,
                    outcome=one.result,
                    count=one.count,
                )
        if self.menu in _MOVING:
            await self._note_moved()
        return await super().judge()

    async def _note_moved(self) -> None:
        """Record the tasks of instants that each side has. A schedule that moves may leave its record behind."""
        for side in self._sides:
            for key, ids in self._promised.items():
                for status in await control_of(side).statuses(key, *ids):
                    if status is not None:
                        told = {"key": key, "task": status.task_id}
                        self.log.note(What.FIRED, outcome="accepted", count=1, **told)

    async def end(self) -> None:
        """Stop the planners first."""
        await asyncio.gather(*(self.cast.stop(a) for a in self.cast.of("planner") if a.alive))
        await super().end()

"""Replicas of Prefect's own server; replicas, workers and store are frozen and killed, and no run is lost."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

import httpx2
import pytest
from websockets.exceptions import WebSocketException

from taskqueue_prefect.reconcile import KEY as LEASE_KEY
from tests.chaos.cases import CHAOS
from tests.prefect.databases import Database
from tests.prefect.environment import python_with_prefect
from tests.prefect.replicas import SECONDS, Replica, Site, executed, started, worker
from tests.prefect.support import Taker
from tests.redis.backends import opened
from tests.redis.engines import find_engine
from tests.redis.servers import RedisServer
from tests.server.support import eventually

KEYS = [f"add-{number:08x}" for number in range(3)]
LEASE = 2.0
SETTINGS = {"TASKQUEUE_REDIS_LEASE": str(LEASE), "TASKQUEUE_PREFECT_GRACE": "3"}
SHORT = ("freeze", "worker", "store", "kill")
PACE, PRODUCERS, TAKERS = 0.4, 3, 4
LIMIT = 2
"""number of runs that the real worker executes at once"""
LONG = 0.5
"""seconds that each run of the real worker takes"""
RECOVERY = 40.0
ANSWERS = {201, 503}
_STATE = {"type": "SCHEDULED", "name": "AwaitingRetry"}
_LOST = (OSError, WebSocketException, TimeoutError, httpx2.TransportError)


@dataclass
class Handled:
    """A run that was sent to a simulated worker."""

    at: int
    """number of the replica that sent it"""
    received: float
    acked: bool = False
    finished: float | None = None
    """time at which Prefect confirmed the final state; None if the worker was killed before"""


class Night:
    """Clients, simulated workers, one real worker, and the faults that hit them and the servers."""

    def __init__(self, site: Site, replicas: list[Replica], seed: int) -> None:
        """Prepare the clients and workers.

        The first replica may be frozen but not killed, because it creates the real worker's runs.
        """
        self.random = Random(seed)
        self.site = site
        self.replicas = replicas
        self.living = set(range(len(replicas)))
        self.afflicted: set[int] = set()
        self.faults: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
        """spans in which a replica was frozen or killed, by its number"""
        self.done: Counter[str] = Counter()
        self.answers: Counter[int] = Counter()
        self.created: set[str] = set()
        self.handled: defaultdict[tuple[str, str], list[Handled]] = defaultdict(list)
        self.early: list[str] = []
        self.http = httpx2.AsyncClient(trust_env=False, timeout=4)
        self.real = worker(site, "real", replicas[1].api, LIMIT)
        self._takers: list[asyncio.Task[None]] = []
        self._repairs: set[asyncio.Task[None]] = set()
        self._names = 0

    def anywhere(self) -> int:
        """Return a random replica that is not killed; it may be frozen, because clients cannot know that."""
        return self.random.choice(sorted(self.living))

    async def produce(self) -> None:
        """Create runs, some of them with a later start time."""
        while True:
            later = self.random.uniform(0.5, 3) if self.random.random() < 0.2 else 0.0
            details: dict[str, Any] = {"deferred": True, "task_parameters_id": str(uuid4())}
            if later:
                at = datetime.now(UTC) + timedelta(seconds=later)
                details["scheduled_time"] = at.isoformat()
            key = self.random.choice(KEYS)
            told = {"task_key": key, "dynamic_key": uuid4().hex, "name": key}
            with contextlib.suppress(*_LOST):
                state = {"type": "SCHEDULED", "state_details": details}
                answer = await self.post("/task_runs/", told | {"state": state})
                self.answers[answer.status_code] += 1
                if answer.status_code == 201:
                    self.created.add(answer.json()["id"])
                elif answer.status_code not in ANSWERS:
                    print(answer.status_code, answer.text[:500])  # noqa: T201 - the status code is asserted later
            await asyncio.sleep(self.random.uniform(0, 2 * PACE))

    async def post(self, path: str, told: object) -> httpx2.Response:
        """Post a request to a random replica."""
        return await self.http.post(f"{self.replicas[self.anywhere()].api}{path}", json=told)

    async def take(self) -> None:
        """Be a simulated worker that reconnects to any replica until it is cancelled."""
        self._names += 1
        name = f"taker-{self._names}"
        while True:
            at = self.anywhere()
            with contextlib.suppress(*_LOST):
                taker = Taker(self.replicas[at].socket, *KEYS, client_id=name)
                async with AsyncExitStack() as ending:
                    async with asyncio.timeout(3):
                        await ending.enter_async_context(taker)
                    while await self.handle(taker, at):
                        pass
            await asyncio.sleep(0.2)

    async def handle(self, taker: Taker, at: int) -> bool:
        """Receive and finish one run; return whether the socket can still be used."""
        run = await taker.receive(4)
        received = time.time()
        state = run["state"]
        due = state["state_details"].get("scheduled_time")
        if due is not None and received < datetime.fromisoformat(due).timestamp():
            self.early.append(run["id"])
        chance = self.random.random()
        if chance < 0.06:
            if chance < 0.03:
                await taker.socket.send(self.random.choice(['{"type": "quit"}', "{no json"]))
            return False
        if chance < 0.12:
            await asyncio.sleep(self.random.uniform(1, 2 * LEASE))  # busy with the run
        handled = Handled(at, received)
        self.handled[run["id"], state["id"]].append(handled)
        await taker.ack()
        handled.acked = True
        await self.finish(run)
        handled.finished = time.time()
        return True

    async def finish(self, run: dict[str, Any]) -> None:
        """Report a run to Prefect as completed; report one in eight as to be retried."""
        again = run["state"]["name"] == "Scheduled" and int(run["id"][:2], 16) < 32
        at = datetime.now(UTC) + timedelta(seconds=1)
        retry = _STATE | {
            "state_details": {"deferred": True, "scheduled_time": at.isoformat()},
        }
        told = {"state": retry} if again else {"state": {"type": "COMPLETED"}, "force": True}
        while True:
            with contextlib.suppress(*_LOST):
                answer = await self.post(f"/task_runs/{run['id']}/set_state", told)
                if answer.status_code in {200, 201}:
                    return
                assert answer.status_code in ANSWERS, answer.text
            await asyncio.sleep(0.1)

    def at_random(self, seconds: float) -> Iterator[str]:
        """Yield random faults for the given time; one of them is an outage of the store."""
        end, outage = time.monotonic() + seconds, self.random.uniform(0.3, 0.6) * seconds
        outage += time.monotonic()
        menu = ["kill", "kill", "freeze", "freeze", "taker", "worker", "doze"]
        while time.monotonic() < end:
            what = self.random.choice(menu)
            if time.monotonic() > outage:
                what, outage = "store", float("inf")
            yield what

    async def rage(self, plan: Iterable[str]) -> None:
        """Inflict the planned faults, one every second or two."""
        for what in plan:
            await asyncio.sleep(self.random.uniform(1, 2))
            self.done[what] += 1
            match what:
                case "kill" | "freeze":
                    first = 1 if what == "kill" else 0
                    await eventually(self._one_may_suffer, SECONDS)
                    there = sorted(set(range(first, len(self.replicas))) - self.afflicted)
                    self._repair(self._afflict(self.random.choice(there), what))
                case "taker":
                    await self._replace_taker(self.random.randrange(TAKERS))
                case "worker":
                    self.real.kill()
                case "doze":
                    self.real.freeze()
                    self._repair(self._wake(self.random.uniform(0.5, 4)))
                case _:
                    began = time.time()
                    self.site.redis.kill()
                    await asyncio.sleep(self.random.uniform(0.1, 1))
                    await asyncio.to_thread(self.site.redis.start)
                    # Leases may have expired, so the outage counts as a fault of every replica.
                    for suffered in range(len(self.replicas)):
                        self.faults[suffered].append((began, time.time() + 1))

    def _one_may_suffer(self) -> bool:
        return len(self.afflicted) < len(self.replicas) - 1  # at least one replica stays unharmed

    def _repair(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._repairs.add(task)

    async def _afflict(self, at: int, what: str) -> None:
        replica, began = self.replicas[at], time.time()
        self.afflicted.add(at)
        if what == "freeze":
            replica.freeze()
            await asyncio.sleep(self.random.uniform(0.3, 2 * LEASE))
            replica.thaw()
        else:
            self.living.discard(at)
            await asyncio.to_thread(replica.kill)
            await asyncio.to_thread(replica.start().ready)
            self.living.add(at)
        self.faults[at].append((began, time.time()))
        self.afflicted.discard(at)

    async def _wake(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):
            self.real.thaw()

    async def _replace_taker(self, number: int) -> None:
        self._takers[number].cancel()
        await asyncio.gather(self._takers[number], return_exceptions=True)
        self._takers[number] = asyncio.create_task(self.take())

    async def _supervise(self) -> None:
        while True:
            if self.real.code is not None:
                self.real.start()
            await asyncio.sleep(0.2)

    @asynccontextmanager
    async def living_on(self, plan: Iterable[str]) -> AsyncIterator[None]:
        """Create runs and inflict the planned faults; workers continue until the end of the context."""
        self._takers = [asyncio.create_task(self.take()) for _ in range(TAKERS)]
        others = [asyncio.create_task(self._supervise())]
        producers = [asyncio.create_task(self.produce()) for _ in range(PRODUCERS)]
        try:
            await self.rage(plan)
            for task in producers:
                task.cancel()
            await asyncio.gather(*self._repairs)
            yield
        finally:
            everybody = [*self._takers, *others, *producers, *self._repairs]
            for task in everybody:
                task.cancel()
            ended = await asyncio.gather(*everybody, return_exceptions=True)
            await self.http.aclose()
        assert [one for one in ended if isinstance(one, Exception)] == []

    def ended(self) -> list[BaseException | None]:
        """Return the exceptions that ended simulated workers."""
        return [task.exception() for task in self._takers if task.done() and not task.cancelled()]

    async def left(self) -> list[dict[str, Any]]:
        """Return the runs that are still scheduled."""
        told = {"task_runs": {"state": {"type": {"any_": ["SCHEDULED"]}}}, "limit": 200}
        answer = await self.http.post(f"{self.replicas[0].api}/task_runs/filter", json=told)
        assert answer.status_code == 200, answer.text
        return list(answer.json())

    async def left_in_the_end(self) -> list[dict[str, Any]]:
        """Wait until no run is scheduled, but not too long; return the remaining ones."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RECOVERY):
                await eventually(self._none_is_left, 2 * RECOVERY)
        return await self.left()

    async def _none_is_left(self) -> bool:
        if not await self.left():
            return True
        await asyncio.sleep(0.2)
        return False

    def twice(self) -> tuple[int, list[str]]:
        """Return how many executions of a run in one state were repeated, and those repeated without a reason.

        Valid reasons: the worker was killed before it reported, or its replica suffered a fault while it waited for the
        ack.
        """
        number, odd = 0, []
        for (run, _), seen in self.handled.items():
            acked = [handled for handled in seen if handled.acked]
            for one, other in pairwise(sorted(acked, key=lambda handled: handled.received)):
                number += 1
                if one.finished is not None and not self._suffered(
                    one.at, one.received, one.finished
                ):
                    odd.append(f"{run}: {one}, {other}; {self.faults[one.at]}")
        return number, odd

    def _suffered(self, at: int, since: float, until: float) -> bool:
        return any(
            began < until + 0.5 and ended > since - LEASE for began, ended in self.faults[at]
        )


@pytest.fixture
def place(folder: Path) -> Path:
    """Return the folder of the run, after creating it."""
    folder.mkdir()
    return folder


async def live_through(
    folder: Path, seed: int, seconds: float, count: int, plan: Iterable[str] = ()
) -> None:
    """Run clients and faults for this many seconds, or as planned, and check the result."""
    config = {"appendfsync": "always"}
    redis = RedisServer(find_engine(), folder / "redis", aof=True, config=config)
    python = python_with_prefect()
    with redis, Database(python) as database, ExitStack() as ending:
        site = Site(python, folder, database.url, redis)
        site.settings |= SETTINGS
        replicas = [Replica(site, f"r{at}") for at in range(count)]
        ending.enter_context(started(*replicas))
        night = Night(site, replicas, seed)
        ending.enter_context(night.real)
        tasks = int(seconds * LIMIT / LONG / 2)
        real = await asyncio.to_thread(
            site.run, "delay.py", str(tasks), "real-", str(LONG), api=replicas[0].api
        )
        async with (
            opened(redis.url, site.prefix) as backend,
            night.living_on(plan or night.at_random(seconds)),
        ):
            left = await night.left_in_the_end()
            queues = [key for key in await backend.control.queues() if key != LEASE_KEY]
            ledgers = {key: await backend.control.ledger(key) for key in queues}
            assert left == [], f"{len(left)}, such as {left[0]}; {ledgers}; {night.ended()}"

            async def all_quiet() -> bool:
                found = [await backend.control.ledger(key) for key in queues]
                return not any(one.waiting + one.in_flight + one.scheduled for one in found)

            try:
                await eventually(all_quiet, 60)
            except AssertionError as error:
                error.add_note(f"{[await backend.control.ledger(key) for key in queues]}")
                raise
            states = {run: replicas[0].state(run) for run in night.created}
            asked = {f"real-{at}": replicas[0].state(run) for at, run in enumerate(real)}
            ledgers = {key: await backend.control.ledger(key) for key in queues}
        said = "".join(replica.log for replica in replicas)
    number, odd = night.twice()
    names = Counter(executed(site))
    print(  # noqa: T201 - prints the figures of the run
        f"seed {seed}: {len(night.created)} runs {dict(night.answers)}, {dict(night.done)}, {number} twice; "
        f"{len(real)} by a real worker {dict(Counter(asked.values()))}, {names.total() - len(names)} twice, "
        f"{said.count('was enqueued again')} put in again, {said.count('came too late')} words too late"
    )
    assert set(night.answers) <= ANSWERS
    assert set(states.values()) == {"Completed"}
    assert night.created <= {run for run, _ in night.handled}
    assert night.early == []
    assert odd == []
    vanished = asked.keys() - names.keys()
    # The real worker was killed while it executed them.
    assert {asked[name] for name in vanished} <= {"Pending", "Running"}
    assert len(vanished) <= LIMIT * night.done["worker"]
    again = names.total() - len(names)
    assert again <= (LIMIT + 1) * night.done["worker"] + night.done["kill"] + night.done["freeze"]
    assert all(one.dead == 0 and one.balanced for one in ledgers.values()), ledgers
    assert "a background task of the task queue failed" not in said
    assert "reconciliation failed: " not in said.replace("reconciliation failed: the store", "")


async def test_a_short_night(place: Path) -> None:
    """Rows E1, E8, faults A6, B1: no run is lost while replicas are frozen and killed, with workers and store."""
    await live_through(place, 1, 5, 2, SHORT)


@CHAOS
@pytest.mark.parametrize("seed", range(10, 15))
async def test_a_long_night(place: Path, seed: int) -> None:
    """Rows E1, E8, faults A6, B1: a minute of random faults on three replicas, workers and store loses no run."""
    await live_through(place, seed, 60, 3)

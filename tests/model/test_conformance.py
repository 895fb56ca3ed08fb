"""Every answer of a real Redis to the script calls of a chaos run equals that of the specification."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from taskqueue_core.authoring.listings import BY_TIME
from taskqueue_core.clock import ManualClock
from taskqueue_core.errors import InvalidInput, LeaseLost, QueueInUse
from taskqueue_core.rate_limit import RateLimit
from taskqueue_core.tasks import Delivery, State, Task
from taskqueue_redis import RedisBackend, receiver
from tests.chaos.cases import CHAOS, SEEDS, passed, small
from tests.chaos.nemesis import schedule
from tests.chaos.seeded import scenario
from tests.model.broken_lists import LIST_MISTAKES
from tests.model.replay import Mismatch, replay
from tests.model.traced import TracedFlow, TracedWorld
from tests.model.tracing import Call, install, traces
from tests.redis.backends import opened
from tests.redis.engines import find_engine
from tests.redis.servers import RedisServer
from tests.redis.test_books import IDS, KEYS, Workload

_MENUS = ("limits", "mixed", "processes", "redis", "links")
_NUMBERS = {"consumer": 2, "producer": 2, "queue": 3}
_LIMITS: Mapping[str, Mapping[str, Any]] = {
    "alpha": {"max_inflight": 10},
    "beta": {"rate_limit": RateLimit(max_tokens=300)},
    "gamma": {"capacity": 100, "max_inflight": 15, "rate_limit": RateLimit(max_tokens=400)},
}


@pytest.mark.parametrize("seed", SEEDS)
async def test_every_call_of_a_chaos_run(folder: Path, seed: int) -> None:
    """R0 to R10, fault M3: all script calls of four processes that are killed, frozen and cut off match the model."""
    menu = _MENUS[seed % len(_MENUS)]
    faults = schedule(seed, menu, seconds=1.0, count=6, numbers=_NUMBERS)
    shape = small(tasks=600, limits=_LIMITS if menu == "limits" else {})
    async with TracedWorld(folder, shape, seed=seed) as world:
        passed(await world.run(faults))
        assert world.compared > 300
        altered_traces_are_found(world.calls)


@pytest.mark.long
@pytest.mark.parametrize(
    "menu",
    ["schedules", *(pytest.param(menu, marks=CHAOS) for menu in ("release", "held", "full"))],
)
async def test_every_call_of_workflows_and_schedules(folder: Path, menu: str) -> None:
    """U13, U16, fault M3: all script calls of three servers that are killed match the model, in four partitions."""
    async with TracedFlow(folder, menu=menu, seed=1) as world:
        passed(await world.run(scenario(1, menu).faults))
        assert world.compared > 1000
        assert world.fired > 30


def altered_traces_are_found(calls: list[Call]) -> None:
    """Assert that the comparison rejects a trace with one false record."""
    place = next(n for n, call in enumerate(calls) if call.name == "ack" and b"ok" in call.answer)
    ack = calls[place]
    lies = {
        "a call is missing": [],
        "an answer is another": [ack._replace(answer=[b"lost"] * len(ack.answer))],
        "a call came twice": [ack, ack._replace(words=_renamed(ack.words))],
    }
    for lie, instead in lies.items():
        try:
            replay([*calls[:place], *instead, *calls[place + 1 :]])
        except Mismatch:
            continue
        pytest.fail(lie)


def _renamed(words: tuple[bytes, ...]) -> tuple[bytes, ...]:
    return (*words[:5], b"nobody", *words[6:])


class PlainWorkload(Workload):
    """Random workload without ordering keys, fair order and changes by hand, which the specification lacks."""

    def __init__(self, backend: RedisBackend, clock: ManualClock, chance: random.Random) -> None:
        super().__init__(backend, clock, chance)
        self.orders = False
        self.verbs += [self.doubt, self.delete, self.look, self.pause, self.list, self.list]

    async def end(self) -> None:
        """Do nothing more; the backend closes the consumers."""

    async def limit(self) -> None:
        """Set random limits for a queue, or remove them."""
        limits: dict[str, object] = {
            "capacity": self.chance.choice((None, 10)),
            "max_inflight": self.chance.choice((None, 6)),
            "rate_limit": self.chance.choice((None, RateLimit(max_tokens=9, interval=2))),
            "paused": self.chance.random() < 0.1,
            "intake_paused": self.chance.random() < 0.1,
            "dedupe_window": self.chance.choice((300.0, 3.0)),
            "result_ttl": self.chance.choice((3600.0, 4.0, 2.0)),
            "queue_ttl": self.chance.choice((86_400.0, 60.0)),
            "index": self.chance.choice((("user",), ("user",), ("user", "shop"), ())),
            "keep_ended": self.chance.choice((0, 8.0, 3600.0)),
            "keep_ended_most": self.chance.choice((5, 20)),
        }
        key = self.key()
        settings = await self.backend.control.settings(key)
        await self.backend.control.configure(key, settings.model_copy(update=limits))

    async def fall_silent(self) -> None:
        """Run maintenance instead."""
        await self.maintain()

    async def doubt(self) -> None:
        """Let a consumer list what it has in flight, as after a lost answer."""
        consumer = await self.consumer()
        consumer.mark_uncertain()
        self.held += (await consumer.receive(1, 0)).deliveries

    async def delete(self) -> None:
        """Delete a queue, which is refused if it is in use; some queues have never existed."""
        with contextlib.suppress(QueueInUse):
            await self.backend.control.delete(self.chance.choice((*KEYS, "delta")))

    async def look(self) -> None:
        """Read results, statuses, dead letters and schedules."""
        key, ids = self.key(), [str(n) for n in range(IDS)]
        await self.backend.control.results(key, *ids)
        await self.backend.control.statuses(key, *ids)
        await self.backend.dead_letters.list(key)
        await self.backend.schedules.get("t")
        await self.backend.schedules.list(after="s")

    def task(self, key: str) -> Task:
        """Return a random task, half of them with tags."""
        tags = self.chance.choice(
            (None, (), ("user:1",), ("shop:1", "user:2", "user:1"), ("shop:1",))
        )
        task = super().task(key)
        return task if tags is None else replace(task, tags=tags)

    async def list(self) -> None:
        """Read the first pages of a list of tasks, and what is known of the first of them."""
        chance, listing, key = self.chance, self.backend.listing, self.key()
        state = chance.choice((None, *State))
        tag = chance.choice(("user:1", "user:2", "shop:1")) if state is None else None
        worker = None if tag or chance.random() < 0.7 else chance.choice("xy")
        query: dict[str, Any] = {
            "state": state,
            "tag": tag,
            "worker": worker,
            "tenant": chance.choice((None, None, "a")),
            "newest": chance.random() < 0.5,
            **(await self.limits_of_time(key, state) if state in BY_TIME else {}),
        }
        after = None
        for _ in range(3):
            try:
                page = await listing.tasks(key, after=after, limit=chance.randint(1, 4), **query)
            except InvalidInput:
                return  # the queue does not index the tag, or keeps no worker of this state
            for task in page.tasks[:1]:
                await listing.task(key, task.task_id)
            after = page.next
            if after is None:
                return
            await chance.choice((self.publish, self.receive, self.ack, self.cancel, self.wait))()

    async def limits_of_time(self, key: str, state: State | None) -> dict[str, float]:
        """Return no limit, or times of tasks on the list as the first time, the last one, or both."""
        page = await self.backend.listing.tasks(key, state=state, limit=8, newest=True)
        times = sorted({task.due_at or task.updated_at for task in page.tasks})
        if len(times) < 2:
            return {}
        limits = dict(zip(("since", "until"), sorted(self.chance.sample(times, 2)), strict=True))
        return {name: time for name, time in limits.items() if self.chance.random() < 0.7}

    async def pause(self) -> None:
        """End all tasks, delete a queue, and advance the clock by days, so that queues are removed; rarely.

        A task that is blocked for an hour asks for its parents again, which the specification does not know.
        """
        if self.chance.random() < 0.2:
            while self.consumers:
                await self.consumers.pop().close()
            key = self.key()
            for each in KEYS:
                await self.backend.control.purge(each)
            await self.backend.dead_letters.discard(key)
            await self.backend.control.delete(key)
            for _ in range(3):
                await self.clock.advance(90_000)
                await self.maintain()


class ListedWorkload(PlainWorkload):
    """Random workload with more lists and erasures, in queues that keep tasks and are not removed."""

    def __init__(self, backend: RedisBackend, clock: ManualClock, chance: random.Random) -> None:
        super().__init__(backend, clock, chance)
        self.verbs = [verb for verb in self.verbs if verb not in (self.pause, self.delete)]
        self.verbs += 5 * [
            self.limit, self.list, self.erase, self.receive, self.ack, self.bury, self.publish,
        ]  # fmt: skip


class LargeWorkload(PlainWorkload):
    """Random workload with bodies and results so large that some calls process only a part."""

    def __init__(self, backend: RedisBackend, clock: ManualClock, chance: random.Random) -> None:
        super().__init__(backend, clock, chance)
        self.verbs = [
            self.publish, self.publish, self.publish, self.receive, self.receive, self.ack, self.redeliver, self.lose,
            self.bury, self.retry, self.purge, self.redrive, self.maintain, self.wait, self.leave, self.adopt,
            self.look, self.doubt, self.reschedule,
        ]  # fmt: skip

    def some(self) -> list[Delivery]:
        """Return many random deliveries, some of them twice."""
        found = super().some()
        for _ in range(10):
            found += super().some()
        return found

    async def publish(self) -> None:
        """Publish a few tasks, most of them large."""
        tasks = []
        for _ in range(self.chance.randint(20, 40)):
            body = b"1" * self.chance.choice((5_000, 250_000, 250_000))
            later = self.chance.choice((None, self.clock.now() + 3))
            id_ = str(self.chance.randrange(IDS))
            unique = self.unique(timed=later is not None)
            tasks.append(
                Task(key=self.key(), id=id_, payload=body, not_before=later, unique=unique)
            )
        await self.backend.publisher.publish(*tasks)

    async def bury(self) -> None:
        """Dead-letter many deliveries."""
        for delivery in self.some():
            await (await self.consumer()).dead_letter(delivery, "why", "error")

    async def purge(self) -> None:
        """Purge a queue."""
        await self.backend.control.purge(self.key())

    async def receive(self) -> None:
        """Receive many tasks."""
        received = await (await self.consumer()).receive(60, 0)
        self.held += received.deliveries

    async def ack(self) -> None:
        """Ack a few deliveries with large results."""
        if some := self.some():
            await (await self.consumer()).ack(*some, results=[b"1" * 250_000] * len(some))

    async def leave(self) -> None:
        """Cancel all tasks and close all consumers, because a part of them is returned in any order."""
        if self.chance.random() < 0.05:
            await self.end()

    pause = leave

    async def end(self) -> None:
        """Cancel all tasks and close all consumers."""
        for key in KEYS:
            for n in range(IDS):
                await self.backend.control.cancel(key, str(n))
        while self.consumers:
            await self.consumers.pop().close()


@pytest.mark.parametrize(
    ("kind", "steps", "seed"),
    [
        (PlainWorkload, 1000, 1),
        (PlainWorkload, 1000, 4),
        (ListedWorkload, 1500, 2),
        (LargeWorkload, 120, 3),
    ],
)
async def test_every_call_of_any_workload(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[PlainWorkload],
    steps: int,
    seed: int,
) -> None:
    """Laws 1 to 10, fault M3: answers to hand-overs, purges, redrives and all other calls match the specification."""
    monkeypatch.setattr(receiver, "_PENDING", 3)
    clock, chance = ManualClock(1_700_000_000.0), random.Random(seed)
    end = install()
    try:
        with RedisServer(find_engine(), folder, aof=False) as server:
            async with opened(server.url, "m", clock=clock) as backend:
                workload = kind(backend, clock, chance)
                for _ in range(steps):
                    with contextlib.suppress(LeaseLost):
                        await chance.choice(workload.verbs)()
                for key in ("alpha", "beta", "gamma"):
                    await backend.control.statuses(key, *map(str, range(150)))
                    await backend.control.stats(key)
                await workload.end()
            calls = list(traces(server, "{m:0}"))
            replayed = replay(calls)
    finally:
        end()
    assert replayed.compared > 0.6 * steps
    assert replayed.replacements > 10
    if kind is LargeWorkload:
        assert replayed.filled > 5
    else:
        assert replayed.fired > 20
        for mistake, shown_by in LIST_MISTAKES.items() if kind is ListedWorkload else ():
            with pytest.raises(Mismatch, match=f": ({shown_by}) "):
                replay(calls, mistake)

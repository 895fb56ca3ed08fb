"""Real processes on one store: killed consumers, races, and notifications from one process to another.

These tests apply to classes that define `Harness.opener`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

from taskqueue_conformance import processes as programs
from taskqueue_conformance.bench import KEY, Bench, ids
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.processes import Process, processes
from taskqueue_conformance.selection import Need, needs
from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import has
from taskqueue_core.tasks import Delivery

_NEEDS: tuple[Need, ...] = ("opener",)
_KILLS = 8
"""number of processes that are killed under load, one after the other"""
_VERBS = ("begun", "published", "acking", "done")
"""messages that a process sends before and after its calls"""
_RACED = 150
"""number of tasks in a race of three processes"""


class ProcessesSuite(Harness, needs=_NEEDS):
    """Tests with real processes."""

    async def test_killed_process_loses_its_deliveries(self, bench: Bench) -> None:
        """The tasks of a killed process become available again, with one loss each (laws 1, 3, 10)."""
        async with processes(bench) as others:
            holder = await others.start(programs.hold, "killed", ["t1", "t2", "t3"])
            assert await holder.hears(bench.harness.patience) == ["t1", "t2", "t3"]
            await holder.kill()
            async with others.here() as here:
                found = await _returned(here, 3)
        assert sorted(ids(found)) == ["t1", "t2", "t3"]
        assert {(d.attempt, d.losses) for d in found} == {(1, 1)}, (
            f"the end of a process costs one loss and no attempt (law 3): {found}"
        )

    @needs("shared")
    async def test_living_process_keeps_its_deliveries(self, bench: Bench) -> None:
        """A process that only waits keeps its deliveries while those of a killed process come back (laws 2, 10)."""
        async with processes(bench) as others:
            alive = await others.start(programs.hold, "alive", ["kept"])
            assert await alive.hears(bench.harness.patience) == ["kept"]
            for name in ("first", "second"):  # so that more than one interval passes
                killed = await others.start(programs.hold, "killed", [name])
                assert await killed.hears(bench.harness.patience) == [name], (
                    "a living process lost its delivery (law 2)"
                )
                await killed.kill()
                async with others.here() as here:
                    (found,) = await _returned(here, 1)
                    assert found.task.id == name, "a living process lost its delivery (law 2)"
                    await here.backend.subscribe([KEY], "other").ack(found)
            alive.tell("ack")
            answers = await alive.hears(bench.harness.patience)
            assert answers == ["ok"], f"a living process lost its delivery (law 2): {answers}"

    @needs("shared")
    async def test_publish_wakes_another_process(self, bench: Bench) -> None:
        """A publish in one process immediately wakes a receive that waits in another process (E1)."""
        async with processes(bench) as others, others.here() as here:
            waiting = await others.start(programs.wait, "waiting")
            for number in range(30):
                await _heard(waiting, bench, "waiting")
                # Publish at different moments after a receive has started.
                await asyncio.sleep(number % 6 / 1000)
                await here.publish(f"t{number}")
                await _heard(waiting, bench, [f"t{number}"])

    @needs("shared")
    async def test_return_wakes_another_process(self, bench: Bench) -> None:
        """A release in one process immediately wakes a receive that waits in another process (E1)."""
        async with processes(bench) as others, others.here() as here:
            subscription, delivery = await here.running("t1")
            waiting = await others.start(programs.wait, "waiting")
            await _heard(waiting, bench, "waiting")
            await subscription.redeliver(delivery)
            await _heard(waiting, bench, ["t1"])

    @needs("shared")
    async def test_race_of_processes(self, bench: Bench) -> None:
        """Three processes that receive at the same time share the tasks, and no task is delivered twice (laws 1, 2)."""
        async with processes(bench) as others, others.here() as here:
            racers = [await others.start(programs.race, f"racer{n}", n + 1) for n in range(3)]
            for racer in racers:
                await _heard(racer, bench, "waiting")
            await here.publish(*(f"t{n}" for n in range(_RACED)))
            for racer in racers:
                racer.tell("start")
            results = [await racer.hears(bench.harness.silence + 20) for racer in racers]
            times = Counter(name for taken, _ in results for name in taken)
            twice = [name for name, count in times.items() if count > 1]
            assert not twice, f"tasks were delivered to two processes (law 2): {twice}"
            assert len(times) == _RACED, f"expected {_RACED} deliveries, got {len(times)} (law 1)"
            answers = Counter(answer for _, settled in results for answer in settled)
            assert answers == {"ok": _RACED}, f"expected {_RACED} acks, got {answers} (law 2)"
            await here.expect(done=_RACED)

    async def test_killed_at_any_moment(self, bench: Bench) -> None:
        """Each call of a killed process has taken full effect or none, and every confirmed effect is kept (law 1)."""
        said: dict[str, set[str]] = {verb: set() for verb in _VERBS}
        async with processes(bench) as others:
            number, end = 0, time.monotonic() + 10 * bench.harness.patience
            while number < _KILLS or not said["done"]:
                assert time.monotonic() < end, "no process acked a task before it was killed"
                victim = await others.start(programs.toil, f"p{number}")
                await asyncio.sleep(0.05 + number * 0.017)
                await victim.kill()
                for verb, name in victim.messages():
                    said[verb].add(name)
                number += 1
            async with others.here() as here:
                subscription, found = here.subscribe(), dict[str, Delivery]()
                end = time.monotonic() + bench.harness.silence
                wanted = said["published"] - said["acking"]
                while not (wanted <= found.keys() and await _all_taken(here, len(found))):
                    assert time.monotonic() < end, (
                        f"tasks were lost (law 1): {sorted(wanted - found.keys())}"
                    )
                    for delivery in await _step(here, subscription):
                        found[delivery.task.id] = delivery
                again = found.keys() & said["done"]
                assert not again, f"acked tasks were delivered again (law 2): {again}"
                await subscription.ack(*found.values())
                await _all_done(here, sorted(said["begun"]))


async def _heard(process: Process, bench: Bench, expected: object) -> None:
    try:
        heard = await process.hears(bench.harness.patience)
    except TimeoutError:
        raise AssertionError(f"expected {expected!r} from another process, got nothing") from None
    assert heard == expected


async def _step(bench: Bench, subscription: Any) -> list[Delivery]:
    if has(bench.backend, Capability.CONTROL):
        await bench.control.maintain()
    return await bench.take(subscription, 50)


async def _returned(bench: Bench, count: int) -> list[Delivery]:
    """Run maintenance and receive until ``count`` deliveries have come back."""
    subscription, found = bench.subscribe(consumer="finder"), list[Delivery]()
    end = time.monotonic() + bench.harness.silence
    while len(found) < count:
        assert time.monotonic() < end, (
            f"deliveries of a killed process did not come back within {bench.harness.silence} s "
            f"(law 10): expected {count}, got {len(found)}"
        )
        found += await _step(bench, subscription)
        await asyncio.sleep(0.01)
    return found


async def _all_taken(bench: Bench, count: int) -> bool:
    """Return whether no task is left except the ``count`` tasks in flight here."""
    if not has(bench.backend, Capability.CONTROL):
        return True
    ledger = await bench.control.ledger(KEY)
    return (ledger.waiting, ledger.scheduled, ledger.in_flight) == (0, 0, count)


async def _all_done(bench: Bench, names: list[str]) -> None:
    """Fail unless the ledger and the states of the tasks agree that all tasks that were stored are done."""
    if not has(bench.backend, Capability.CONTROL):
        return
    states = Counter[str]()
    for name in names:
        if (state := await bench.state(name)) is not None:
            states[state.value] += 1
    ledger = await bench.control.ledger(KEY)
    assert ledger.balanced, f"the ledger does not balance: {ledger} (law 1)"
    counted = {
        "waiting": ledger.waiting,
        "scheduled": ledger.scheduled,
        "in_flight": ledger.in_flight,
    }
    assert not any(counted.values()), f"all tasks are done, but the ledger is {ledger} (law 1)"
    assert states == {"done": ledger.done}, (
        f"the ledger does not match the states of the tasks: {ledger}, {states} (law 1)"
    )

"""What is left in the queue, or with a worker, when replicas, workers and the store end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from websockets.exceptions import ConnectionClosed

from taskqueue_redis import RedisBackend
from tests.prefect.replicas import Replica, Site, executed, worker
from tests.prefect.support import Taker
from tests.server.support import eventually

BACKLOG = 20


def key() -> str:
    """A task's key that no other test has."""
    return f"add-{uuid4().hex[:8]}"


@pytest.fixture(scope="module")
def steady(site: Site) -> Iterator[Replica]:
    """A replica that lives on."""
    with Replica(site, "steady") as found:
        yield found


async def test_a_killed_replica_takes_nothing_along(
    site: Site, steady: Replica, backend: RedisBackend
) -> None:
    """Row E8, fault F11: a backlog, and what a worker had not acked, outlive the kill of the replica they were at."""
    name = key()
    with Replica(site, "doomed") as doomed:
        runs = [doomed.created(name) for _ in range(BACKLOG)]
        async with Taker(doomed.socket, name, client_id="unlucky") as taker:
            first = (await taker.receive())["id"]
            await taker.ack()
            second = (await taker.receive())["id"]  # in hand, when the replica is killed
            doomed.kill()
        seen = Counter([first])
        async with Taker(steady.socket, name, client_id="lucky") as other:
            for _ in range(BACKLOG - 1):
                seen[(await other.receive(20))["id"]] += 1
                await other.ack()
            await other.nothing_comes()
    assert seen == Counter(runs)
    assert second in seen
    ledger = await backend.control.ledger(name)
    assert (ledger.published, ledger.done) == (BACKLOG, BACKLOG)


async def test_all_replicas_end_and_begin_again(site: Site, backend: RedisBackend) -> None:
    """Rows E1, E8: a restart of every server with a backlog loses none of it (Prefect's own queue loses all)."""
    name = key()
    with Replica(site, "once") as once:
        runs = [once.created(name) for _ in range(BACKLOG)]
        assert once.stop() in {0, -signal.SIGTERM}
        once.start().ready()
        async with Taker(once.socket, name) as taker:
            seen = []
            for _ in range(BACKLOG):
                seen.append((await taker.receive())["id"])
                await taker.ack()

            async def all_settled() -> bool:
                return (await backend.control.ledger(name)).done == BACKLOG

            await eventually(all_settled)
    assert seen == runs


async def test_a_store_that_forgets(site: Site, steady: Replica, backend: RedisBackend) -> None:
    """Row E8: runs that the store has lost altogether are put in again, as the database says; no more than once."""
    name = key()
    runs = {steady.created(name) for _ in range(5)}
    with site.redis.connect() as redis:
        redis.call("FLUSHALL")
    async with Taker(steady.socket, name) as taker:
        seen = set()
        for _ in runs:
            seen.add((await taker.receive(20))["id"])
            await taker.ack()
        assert seen == runs
        await taker.nothing_comes(2)
    settings = await backend.control.settings(name)
    assert settings.capacity == 1000  # as before: a queue that was put in again is bounded again


async def test_a_store_that_is_away(site: Site, steady: Replica, backend: RedisBackend) -> None:
    """Faults E1, E4: without its Redis a replica answers with 503 in time, and reads on; then all flows again."""
    name = key()
    waiting = steady.created(name)
    site.redis.call("CONFIG", "SET", "appendfsync", "always")  # what it has answered, it keeps
    async with Taker(steady.socket, name) as taker:
        assert (await taker.receive())["id"] == waiting
        await taker.ack()

        async def acked() -> bool:
            return (await backend.control.ledger(name)).done == 1

        await eventually(acked)  # else the word is lost with the store: the run would be out again
        site.redis.kill()
        began = time.monotonic()
        answer = await asyncio.to_thread(steady.create, name)
        assert answer.status_code == 503, answer.text
        assert "retry-after" in answer.headers
        asked = {"task_worker_filter": {"task_keys": [name]}}
        answer = await asyncio.to_thread(steady.client.post, "/task_workers/filter", json=asked)
        assert answer.status_code == 503, answer.text
        assert time.monotonic() - began < 5
        assert steady.state(waiting) == "Scheduled"
        await asyncio.to_thread(site.redis.start)
        await eventually(lambda: steady.create(name).status_code == 201, 20)
        assert (await taker.receive(20))["id"] != waiting
        await taker.ack()


def test_busy_workers_run_each_once(site: Site, steady: Replica) -> None:
    """Rows E8, E6: eight runs longer than the lease, on two workers that take one at a time: eight executions."""
    with worker(site, "w1", steady.api, 1), worker(site, "w2", steady.api, 1):
        runs = site.run("delay.py", "8", "long-", "4", api=steady.api)
        steady.all_reach("Completed", runs)
    done = [name for name in executed(site) if name.startswith("long-")]
    assert sorted(done) == [f"long-{n}" for n in range(8)]


def test_retries_come_at_their_time(site: Site, steady: Replica) -> None:
    """Row REV-E2: a task with a retry and a delay is executed again, and not before its time."""
    with worker(site, "w3", steady.api):
        runs = site.run("delay.py", "3", "again-", "0", "fail_once", api=steady.api)
        steady.all_reach("Completed", runs)
    times: dict[str, list[float]] = {}
    for line in executed(site):
        name, _, at = line.partition("@")
        if at:
            times.setdefault(name, []).append(float(at))
    assert {name: len(found) for name, found in times.items()} == dict.fromkeys(
        [f"again-{n}" for n in range(3)], 2
    )
    assert all(later - earlier >= 1.9 for earlier, later in times.values())


@pytest.mark.parametrize("module", [False, True], ids=["prefect", "python -m prefect"])
async def test_several_processes_of_one_server(site: Site, *, module: bool) -> None:
    """Row E1: the processes of ``--workers`` share the queue (each of Prefect's own has one for itself).

    Started by ``python -m prefect``, Prefect does not run any plugins in them.
    """
    name = key()
    words = ("--no-services", "--workers", "2")
    start = ("-m", "prefect") if module else (str(Path(site.python).with_name("prefect")),)

    class Many(Replica):
        command = (*start, "server", "start")

    with Many(site, f"many-{module}", *words, **site.messages) as many:
        runs = {many.created(name) for _ in range(BACKLOG)}
        seen: set[str] = set()

        async def take(number: int) -> None:
            while True:  # as a worker does, which comes again
                with contextlib.suppress(ConnectionClosed, OSError):
                    async with Taker(many.socket, name, client_id=f"t{number}") as taker:
                        while True:
                            seen.add((await taker.receive())["id"])
                            await taker.ack()
                await asyncio.sleep(0.2)

        taking = [asyncio.create_task(take(number)) for number in range(3)]
        await eventually(lambda: many.log.count("tasks go through the backend") == 2, 30)
        try:
            await eventually(lambda: seen == runs, 60)
        except AssertionError:
            ended = [task.exception() for task in taking if task.done()]
            raise AssertionError(
                f"{len(seen)} of {len(runs)}, {ended}: {many.log[-3000:]}"
            ) from None
        finally:
            for task in taking:
                task.cancel()
            await asyncio.gather(*taking, return_exceptions=True)

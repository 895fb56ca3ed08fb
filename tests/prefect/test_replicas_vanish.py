"""Tests of runs in the queue or with a worker when replicas, workers or the store end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from taskqueue_core.errors import BackendUnavailable
from taskqueue_prefect.names import client_of
from taskqueue_redis import RedisBackend
from tests.binaries.folders import ROOT
from tests.prefect.databases import Database
from tests.prefect.replicas import GRACE, SECONDS, Replica, Site, key
from tests.prefect.support import Taker, done
from tests.redis.servers import wait_until
from tests.server.support import eventually

Pair = tuple[Replica, Replica]
BACKLOG = 12
PARENT = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from tests.prefect.replicas import Process
folder = Path(sys.argv[1])
child = "import time; open('child', 'w').close(); time.sleep(1000)"
program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
place = SimpleNamespace(python=sys.executable, folder=folder)
with Process(place, "p", ["-c", program], {}) as process:
    (folder / "pid").write_text(str(process.pid))
    (folder / "pid").rename(folder / "group")
    time.sleep(1000)
"""
"""imitates a test process with a program that has a child process"""


async def test_a_store_that_forgets(site: Site, pair: Pair, backend: RedisBackend) -> None:
    """Row E8: runs that the store has lost are published again from the database, each once."""
    a, b = pair
    name = key()
    runs = {a.created(name) for _ in range(5)}
    with site.redis.connect() as redis:
        redis.call("FLUSHALL")
    async with Taker(b.socket, name) as taker:
        seen = set()
        for _ in runs:
            seen.add((await taker.receive(SECONDS))["id"])
            await taker.ack()
        assert seen == runs
        await taker.nothing_comes(2 * GRACE)
    settings = await backend.control.settings(name)
    assert settings.capacity == 1000  # the queue that was created again has its limit again


async def test_an_idle_worker_when_the_store_forgets(
    site: Site, pair: Pair, backend: RedisBackend
) -> None:
    """Rows E8 and U26: a worker that was idle during a flush is listed again; it keeps what it then accepts."""
    _, b = pair
    name = key()

    async def listed() -> bool:
        with contextlib.suppress(BackendUnavailable):
            workers = await backend.control.workers()
            return any(client_of(each.worker_id) == "idle" for each in workers)
        return False

    async with Taker(b.socket, name, client_id="idle") as taker:
        await eventually(listed)
        with site.redis.connect() as redis:
            redis.call("FLUSHALL")
        await eventually(listed)
        run = b.created(name)
        assert (await taker.receive())["id"] == run
        await taker.ack()
        await taker.nothing_comes(2 * GRACE)


async def test_a_worker_that_is_lost_before_it_begins(pair: Pair, backend: RedisBackend) -> None:
    """Row U26: a run that a killed worker has set to pending is sent to another one, with its parameters."""
    a, b = pair
    name = key()
    run = a.created(name)
    async with Taker(a.socket, name, client_id="lost") as taker:
        sent = await taker.receive()
        assert sent["id"] == run
        await taker.ack()
        await done(backend, name, 1)
        pending = {"type": "PENDING", "state_details": {"deferred": True}}
        told = {"state": pending, "force": True}
        assert a.client.post(f"/task_runs/{run}/set_state", json=told).status_code == 201
        assert a.state(run) == "Pending"
    async with Taker(b.socket, name, client_id="other") as taker:
        again = await taker.receive(SECONDS)
        await taker.ack()
        details = [one["state"]["state_details"] for one in (sent, again)]
        assert again["id"] == run
        assert details[0]["task_parameters_id"] == details[1]["task_parameters_id"]
        a.complete(run)


async def test_a_store_that_is_away(site: Site, pair: Pair, backend: RedisBackend) -> None:
    """Faults E1, E4: without its Redis a replica answers with 503 in time and still serves reads.

    It recovers afterwards.
    """
    a, _ = pair
    name = key()
    waiting = a.created(name)
    # so that Redis keeps everything it has confirmed
    site.redis.call("CONFIG", "SET", "appendfsync", "always")
    async with Taker(a.socket, name) as taker:
        assert (await taker.receive())["id"] == waiting
        await taker.ack()

        async def acked() -> bool:
            return (await backend.control.ledger(name)).done == 1

        # otherwise the ack could be lost with the store, and the run would be sent again
        await eventually(acked)
        a.complete(waiting)
        site.redis.kill()
        try:
            answer = await asyncio.to_thread(
                a.create, name
            )  # this client has a timeout, so a missing answer would be noticed
            assert answer.status_code == 503, answer.text
            assert "retry-after" in answer.headers
            asked = {"task_worker_filter": {"task_keys": [name]}}
            answer = await asyncio.to_thread(a.client.post, "/task_workers/filter", json=asked)
            assert answer.status_code == 503, answer.text
            assert a.state(waiting) == "Completed"
        finally:
            await asyncio.to_thread(site.redis.start)
        await eventually(lambda: a.create(name).status_code == 201, SECONDS)
        assert (await taker.receive(SECONDS))["id"] != waiting
        await taker.ack()


def test_a_replica_that_does_not_start(site: Site) -> None:
    """Row E3: a server whose backend setting names no backend does not start, says why, and leaves no process."""
    server = Replica(site, "none", TASKQUEUE_BACKEND="json")
    with pytest.raises(AssertionError, match="'json'"), server:
        pass
    assert server.code not in {0, None}
    with pytest.raises(ProcessLookupError):
        os.killpg(server.pid, 0)


def test_a_database_that_does_not_start(prefect_python: str) -> None:
    """Test of the test support: a PostgreSQL that cannot start says why, and leaves neither processes nor files."""
    database = Database(prefect_python)
    taken = socket.create_server(("127.0.0.1", database.port))
    with (
        taken,
        pytest.raises(AssertionError, match="could not create any TCP/IP sockets"),
        database,
    ):
        pass
    assert not database.data.parent.exists()


def test_killed_tests_leave_no_process(tmp_path: Path) -> None:
    """Test of the test support: if a test process is killed, its programs and their children end too."""
    with subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], cwd=ROOT) as parent:
        try:
            for name in ("child", "group"):
                wait_until((tmp_path / name).exists, "all processes have started", seconds=SECONDS)
        finally:
            parent.kill()
    group = int((tmp_path / "group").read_text())

    def ended() -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, 0)
            return False
        return True

    wait_until(ended, "all processes have ended", seconds=SECONDS)


async def test_every_replica_ends(pair: Pair, backend: RedisBackend) -> None:
    """Rows E1, E8, fault F11: no run is lost when one replica is killed, the other stopped, and the first restarted.

    Prefect's own queue would lose the backlog and the unacked run. This must be the last test of the two replicas in
    this file, because one stays stopped.
    """
    a, b = pair
    name = key()
    runs = [b.created(name) for _ in range(BACKLOG)]
    seen: Counter[str] = Counter()

    async def take(taker: Taker, at: Replica, count: int) -> None:
        before = seen.total()
        while seen.total() < before + count:
            run = (await taker.receive(SECONDS))["id"]
            seen[run] += 1
            await taker.ack()
            at.complete(run)
        await done(backend, name, seen.total())

    async with Taker(b.socket, name, client_id="unlucky") as taker:
        await take(taker, b, 1)
        held = (await taker.receive())["id"]
        b.kill()
    async with Taker(a.socket, name, client_id="lucky") as taker:
        await take(taker, a, BACKLOG // 2)
    assert a.stop() in {0, -signal.SIGTERM}
    b.start().ready()
    async with Taker(b.socket, name, client_id="late") as taker:
        await take(taker, b, BACKLOG - seen.total())
        await taker.nothing_comes()
    assert seen == Counter(runs)
    (status,) = await backend.control.statuses(name, held)
    assert status is not None
    assert (status.attempt, status.losses) == (1, 1)

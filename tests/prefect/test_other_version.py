"""Tests of other releases of Prefect, which have other tables: their servers and workers share one queue."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.prefect.databases import Database
from tests.prefect.environment import MIDDLE, OLDEST, OTHER, other_prefect
from tests.prefect.replicas import GRACE, SECONDS, Replica, Site, executed, key, worker
from tests.prefect.support import Taker

BACKLOG = 10


@pytest.fixture(scope="module")
def database(site: Site) -> Iterator[Database]:
    """Yield a database that is empty at first; each release upgrades the tables of the release before it."""
    with Database(site.python, empty=True) as database:
        yield database


@pytest.fixture(params=[OLDEST, MIDDLE, OTHER])
def other(site: Site, database: Database, tmp_path: Path, request: pytest.FixtureRequest) -> Site:
    """Return a site that uses another release, with the database of this file and the common store."""
    other = Site(site.python, tmp_path, database.url, site.redis)
    own = site.environment("any")["PYTHONPATH"]
    other.more["PYTHONPATH"] = os.pathsep.join([str(other_prefect(request.param)), own])
    other.settings["TASKQUEUE_REDIS_PREFIX"] = f"other-{request.param}"
    other.settings["TASKQUEUE_PREFECT_STRICT"] = "true"
    return other


@pytest.mark.long
async def test_replicas_of_another_release(other: Site, request: pytest.FixtureRequest) -> None:
    """Rows E1, REV-E2, U26, fault A6: runs created at one replica go to the other's worker.

    A killed replica loses no run and no scheduled time.
    """
    name = key()
    migrate = {"PREFECT_API_DATABASE_MIGRATE_ON_START": "true"}
    with Replica(other, "a", **migrate) as a, Replica(other, "b") as b:
        version = a.client.get("/admin/version").json()
        assert f"[{version}]" in request.node.name
        assert "may not work" not in a.log
        with worker(other, "w", b.api):
            a.all_reach("Completed", other.run("delay.py", "20", "next-", api=a.api))
        assert sorted(executed(other)) == sorted(f"next-{n}" for n in range(20))
        async with Taker(a.socket, name, client_id="unlucky") as unlucky:
            runs = {a.created(name) for _ in range(BACKLOG)}
            await unlucky.receive()
            at = datetime.now(UTC) + timedelta(seconds=4)
            late = a.created(name, scheduled_time=at.isoformat())
            a.kill()
        async with Taker(b.socket, name) as taker:
            seen: set[str] = set()
            while late not in seen:
                seen.add((await taker.receive(SECONDS))["id"])
                await taker.ack()
            assert datetime.now(UTC) >= at
            while len(seen) <= BACKLOG:
                seen.add((await taker.receive(SECONDS))["id"])
                await taker.ack()
            assert seen == {*runs, late}
            await taker.nothing_comes(2 * GRACE)

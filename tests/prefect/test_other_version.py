"""The next release of Prefect, with another set of tables: its servers and workers have the same queue."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from uuid import uuid4

from tests.prefect.environment import OTHER, other_prefect
from tests.prefect.replicas import Replica, Site, executed, worker
from tests.prefect.support import Taker

BACKLOG = 10


async def test_replicas_of_another_release(site: Site) -> None:
    """Rows E1, REV-E2, fault A6: from one to the other's worker; a killed replica takes no run and no time along."""
    path = os.pathsep.join([str(other_prefect()), site.environment("any")["PYTHONPATH"]])
    site.more["PYTHONPATH"] = path
    name = f"add-{uuid4().hex[:8]}"
    migrate = {"PREFECT_API_DATABASE_MIGRATE_ON_START": "true"}
    with Replica(site, "a", **migrate) as a, Replica(site, "b") as b:
        assert a.client.get("/admin/version").json() == OTHER
        assert "may not work" not in a.log
        with worker(site, "w", b.api):
            a.all_reach("Completed", site.run("delay.py", "20", "next-", api=a.api))
        assert sorted(executed(site)) == sorted(f"next-{n}" for n in range(20))
        async with Taker(a.socket, name, client_id="unlucky") as unlucky:
            runs = {a.created(name) for _ in range(BACKLOG)}
            await unlucky.receive()
            at = datetime.now(UTC) + timedelta(seconds=4)
            late = a.created(name, scheduled_time=at.isoformat())
            a.kill()
        async with Taker(b.socket, name) as taker:
            seen: set[str] = set()
            while len(seen) < BACKLOG:
                seen.add((await taker.receive(20))["id"])
                await taker.ack()
            assert seen == runs
            assert (await taker.receive(20))["id"] == late
            assert datetime.now(UTC) >= at
            await taker.ack()
            await taker.nothing_comes()

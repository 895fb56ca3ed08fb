"""Whether waiting runs are executed: with replicas, with several server processes, after a restart and after a kill.

The runs are created by ``task.delay()``, and executed by Prefect's task workers.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import prefect_figures as figures
from prefect_balancer import Balancer
from prefect_sides import Side, completed

from tests.prefect.replicas import Process, Replica, Site, executed, worker

_AT_A_TIME = 50


def across(side: Side) -> dict[str, float]:
    """Create runs at one replica while the worker is connected to another replica."""
    with worker(side.site, "across", side.b.api):
        runs = _delayed(side, figures.DELAYED, "across-", side.a.api)
        return {figures.ACROSS: completed(side.a, runs)}


def restart(side: Side) -> dict[str, float]:
    """Stop and start a replica while all its runs are waiting."""
    runs = _delayed(side, figures.WAITING, "restart-", side.a.api)
    side.a.stop()
    side.a.start().ready()
    with worker(side.site, "restart", side.a.api):
        return {figures.RESTART: completed(side.a, runs)}


def kill(side: Side) -> dict[str, float]:
    """Kill one of two replicas that have received the same number of runs, then connect a worker."""
    with Balancer([side.a.port, side.b.port]) as balancer:
        runs = _delayed(side, figures.WAITING, "kill-", balancer.api)
        side.a.kill()
        with worker(side.site, "kill", balancer.api):
            done = completed(side.b, runs)
    twice = sum(times > 1 for times in _times(side, "kill-").values())
    side.a.start().ready()
    return {figures.KILL: done, figures.KILL_TWICE: twice}


def many(side: Side) -> dict[str, float]:
    """Use one server with three processes, and a fourth process for its background services, as Prefect supports it."""
    words = ("--no-services", "--workers", "3")
    settings: dict[str, Any] = side.site.messages
    services = Process(
        side.site,
        "services",
        ["-m", "prefect", "server", "services", "start"],
        side.site.environment("services", **side.site.settings | settings),
    )
    with (
        services,
        _Many(side.site, "many", *words, **settings) as server,
        worker(side.site, "many-w", server.api),
    ):
        runs = _delayed(side, figures.AT_ONE_OF_MANY, "many-", server.api)
        return {figures.MANY: completed(server, runs) / len(runs)}


class _Many(Replica):
    """A replica started by the command ``prefect``, because processes of ``python -m prefect`` do not load plugins."""

    def __init__(self, site: Site, name: str, *words: str, **settings: str) -> None:
        """As `Replica`."""
        self.command = (str(Path(site.python).with_name("prefect")), "server", "start")
        super().__init__(site, name, *words, **settings)


def _delayed(side: Side, count: int, prefix: str, api: str) -> list[str]:
    """Create ``count`` runs whose names begin with ``prefix``, divided among several clients; return their ids."""
    found: list[str] = []
    while left := count - len(found):
        words = (str(min(left, _AT_A_TIME)), f"{prefix}{len(found)}-")
        found += side.site.run("delay.py", *words, api=api)
    return found


def _times(side: Side, prefix: str) -> Counter[str]:
    return Counter(one for one in executed(side.site) if one.startswith(prefix))

"""What happens to waiting runs: with replicas, with several server processes, during a restart and after a kill.

They are delayed by ``task.delay()``, and executed by task workers of Prefect.
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
    """Create runs at one replica while the worker is connected to the other."""
    with worker(side.site, "across", side.b.api):
        runs = _delayed(side, figures.DELAYED, "across-", side.a.api)
        return {figures.ACROSS: completed(side.a, runs)}


def restart(side: Side) -> dict[str, float]:
    """All runs of one replica are waiting when it is stopped and started again."""
    runs = _delayed(side, figures.WAITING, "restart-", side.a.api)
    side.a.stop()
    side.a.start().ready()
    with worker(side.site, "restart", side.a.api):
        return {figures.RESTART: completed(side.a, runs)}


def kill(side: Side) -> dict[str, float]:
    """One of two replicas with equally many runs is killed; then a worker connects."""
    with Balancer([side.a.port, side.b.port]) as balancer:
        runs = _delayed(side, figures.WAITING, "kill-", balancer.api)
        side.a.kill()
        with worker(side.site, "kill", balancer.api):
            done = completed(side.b, runs)
    twice = sum(times > 1 for times in _times(side, "kill-").values())
    side.a.start().ready()
    return {figures.KILL: done, figures.KILL_TWICE: twice}


def many(side: Side) -> dict[str, float]:
    """One server of three processes, and its services in a fourth, as Prefect has it."""
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
    """Started by the installed command: processes of ``python -m prefect`` begin without what Prefect's plugins do."""

    def __init__(self, site: Site, name: str, *words: str, **settings: str) -> None:
        """As `Replica`."""
        self.command = (str(Path(site.python).with_name("prefect")), "server", "start")
        super().__init__(site, name, *words, **settings)


def _delayed(side: Side, count: int, prefix: str, api: str) -> list[str]:
    """Delay runs, whose names begin so, some with each client; return their ids."""
    found: list[str] = []
    while left := count - len(found):
        words = (str(min(left, _AT_A_TIME)), f"{prefix}{len(found)}-")
        found += side.site.run("delay.py", *words, api=api)
    return found


def _times(side: Side, prefix: str) -> Counter[str]:
    return Counter(one for one in executed(side.site) if one.startswith(prefix))

"""The account of a run: what the store says, beside what the servers did and a direct computation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec

from taskqueue_core.capabilities import dead_letters_of
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import State, TaskStatus
from taskqueue_dispatch.demo.clients import Clients
from taskqueue_dispatch.demo.faults import Misfortunes
from taskqueue_dispatch.demo.gpu_servers import Works
from taskqueue_dispatch.demo.plan import DemoOptions, Job, Manner, Plan, answer_of
from taskqueue_dispatch.demo.report import Callbacks, Crash, Lie, OfModel, Report
from taskqueue_dispatch.demo.server import Site
from taskqueue_dispatch.names import queue_of

__all__ = ["Account"]

_ENDS = {State.DONE, State.DEAD}
"""no job of a run ends otherwise"""


class Account:
    """Reads what the store has, once all is over."""

    def __init__(self, site: Site, plan: Plan, works: Works, clients: Clients) -> None:
        self._site = site
        self._plan = plan
        self._works = works
        self._clients = clients
        self._control = site.dispatcher.control

    async def report(
        self, options: DemoOptions, misfortunes: Misfortunes, seconds: float
    ) -> Report:
        """Return the account."""
        plan, receiver = self._plan, self._site.receiver
        models = [await self._of_model(manner) for manner in plan.manners]
        ended = await self._ended()
        view = await self._site.dispatcher.pool.look()
        told = {self._clients.ids[job.key] for job in plan.jobs if job.callback}
        return Report(
            backend=options.backend,
            seed=options.seed,
            models=tuple(models),
            outcomes=dict(self._clients.outcomes),
            resent=self._clients.resent,
            crash=Crash(
                server=plan.crashes,
                running=len(misfortunes.crash),
                recovered=len(misfortunes.crash & ended),
            ),
            lie=Lie(server=plan.lies, denied=len(misfortunes.lie)),
            poison=sum(job.fails < 0 for job in plan.jobs),
            reasons=await self._reasons(),
            callbacks=Callbacks(
                expected=len(told),
                delivered=len(told & receiver.ended.keys()),
                refused=len(receiver.refused),
                forged=receiver.forged,
            ),
            held=sum(info.assigned + info.detached for info in view.endpoints),
            seconds=seconds,
        )

    async def _of_model(self, manner: Manner) -> OfModel:
        jobs = [job for job in self._plan.jobs if job.name == manner.name]
        ids = [self._clients.ids[job.key] for job in jobs]
        key, works = queue_of(manner.model), self._works
        stats = await self._control.stats(key)
        statuses = await self._statuses(key, ids)
        states = Counter(one.state if one is not None else None for one in statuses)
        began = sorted(works.began[one] for one in ids if one in works.began)
        waits = sorted(
            max(0.0, works.began[one] - self._clients.confirmed[one])
            for one in ids
            if one in works.began
        )
        servers = {
            site.name: site.slots[manner.name]
            for site in self._plan.machines
            if manner.name in site.slots
        }
        return OfModel(
            name=manner.name,
            manner=manner.told,
            slots=sum(servers.values()),
            jobs=len(jobs),
            done=states[State.DONE],
            failed=states[State.DEAD],
            retried=stats.retried,
            redelivered=stats.redelivered,
            lost=sum(count for state, count in states.items() if state not in _ENDS),
            duplicates=sum(works.ended[one] > 1 for one in ids),
            wrong=await self._wrong(key, jobs, ids, statuses),
            wait_p50=_percentile(waits, 0.5),
            wait_p95=_percentile(waits, 0.95),
            utilisation=works.busy(servers, began[0], began[-1]) if began else 0.0,
            crowded=tuple(
                name for name, slots in servers.items() if works.servers[name].most_at_once > slots
            ),
            ledger=stats.ledger,
        )

    async def _statuses(self, key: str, ids: Sequence[str]) -> list[TaskStatus | None]:
        found: list[TaskStatus | None] = []
        for start in range(0, len(ids), LIMITS.batch):
            found += await self._control.statuses(key, *ids[start : start + LIMITS.batch])
        return found

    async def _wrong(
        self,
        key: str,
        jobs: Sequence[Job],
        ids: Sequence[str],
        statuses: Sequence[TaskStatus | None],
    ) -> int:
        """Count results of jobs that are done and differ from what is computed here."""
        results: list[bytes | None] = []
        for start in range(0, len(ids), LIMITS.batch):
            results += await self._control.results(key, *ids[start : start + LIMITS.batch])
        return sum(
            status is not None
            and status.state is State.DONE
            and (result is None or msgspec.json.decode(result) != answer_of(job.prompt))
            for job, status, result in zip(jobs, statuses, results, strict=True)
        )

    async def _ended(self) -> set[str]:
        """Return the ids of the jobs that are done or have failed, of all models."""
        ended: set[str] = set()
        for manner in self._plan.manners:
            ids = [self._clients.ids[job.key] for job in self._plan.jobs if job.name == manner.name]
            statuses = await self._statuses(queue_of(manner.model), ids)
            ended |= {one.task_id for one in statuses if one and one.state in _ENDS}
        return ended

    async def _reasons(self) -> dict[str, int]:
        """Count the dead letters by their reason."""
        letters = dead_letters_of(self._site.backend)
        reasons: Counter[str] = Counter()
        for manner in self._plan.manners:
            found = await letters.list(queue_of(manner.model), limit=LIMITS.batch)
            reasons.update(letter.reason for letter in found)
        return dict(reasons)


def _percentile(values: Sequence[float], share: float) -> float:
    """Return the value that the share of sorted values does not exceed; 0 for none."""
    return values[max(0, math.ceil(share * len(values)) - 1)] if values else 0.0

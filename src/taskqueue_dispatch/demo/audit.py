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
from taskqueue_dispatch.demo.faults import Faults
from taskqueue_dispatch.demo.gpu_servers import GpuServers
from taskqueue_dispatch.demo.plan import (
    DemoOptions,
    DispatchDemoPlan,
    ModelPlan,
    PlannedJob,
    answer_of,
)
from taskqueue_dispatch.demo.report import (
    Callbacks,
    Crash,
    DispatchDemoReport,
    FalseReport,
    OfModel,
)
from taskqueue_dispatch.demo.server import DemoServer
from taskqueue_dispatch.names import queue_of

_ENDS = {State.DONE, State.DEAD}
"""no job of a run ends otherwise"""


class DemoAudit:
    """Reads what the store has, once all is over."""

    def __init__(
        self, server: DemoServer, plan: DispatchDemoPlan, gpu_servers: GpuServers, clients: Clients
    ) -> None:
        self._server = server
        self._plan = plan
        self._gpu_servers = gpu_servers
        self._clients = clients
        self._control = server.dispatcher.control

    async def report(
        self, options: DemoOptions, faults: Faults, seconds: float
    ) -> DispatchDemoReport:
        """Return the account."""
        plan, receiver = self._plan, self._server.receiver
        models = [await self._of_model(model_plan) for model_plan in plan.models]
        ended = await self._ended()
        view = await self._server.dispatcher.pool.inspect()
        results = {self._clients.ids[job.key] for job in plan.jobs if job.callback}
        return DispatchDemoReport(
            backend=options.backend,
            seed=options.seed,
            models=tuple(models),
            outcomes=dict(self._clients.outcomes),
            resent=self._clients.resent,
            crash=Crash(
                server=plan.crashes,
                running=len(faults.crash),
                recovered=len(faults.crash & ended),
            ),
            lie=FalseReport(server=plan.lies, denied=len(faults.lie)),
            poison=sum(job.fails < 0 for job in plan.jobs),
            reasons=await self._reasons(),
            callbacks=Callbacks(
                expected=len(results),
                delivered=len(results & receiver.ended.keys()),
                refused=len(receiver.refused),
                forged=receiver.forged,
            ),
            held=sum(info.assigned + info.detached for info in view.endpoints),
            seconds=seconds,
        )

    async def _of_model(self, model_plan: ModelPlan) -> OfModel:
        jobs = [job for job in self._plan.jobs if job.name == model_plan.name]
        ids = [self._clients.ids[job.key] for job in jobs]
        key, gpu_servers = queue_of(model_plan.model), self._gpu_servers
        stats = await self._control.stats(key)
        statuses = await self._statuses(key, ids)
        states = Counter(status.state if status is not None else None for status in statuses)
        began = sorted(gpu_servers.began[name] for name in ids if name in gpu_servers.began)
        waits = sorted(
            max(0.0, gpu_servers.began[name] - self._clients.confirmed[name])
            for name in ids
            if name in gpu_servers.began
        )
        servers = {
            server.name: server.slots[model_plan.name]
            for server in self._plan.machines
            if model_plan.name in server.slots
        }
        return OfModel(
            name=model_plan.name,
            mode=model_plan.answer_mode,
            slots=sum(servers.values()),
            jobs=len(jobs),
            done=states[State.DONE],
            failed=states[State.DEAD],
            retried=stats.retried,
            redelivered=stats.redelivered,
            lost=sum(count for state, count in states.items() if state not in _ENDS),
            duplicates=sum(gpu_servers.ended[name] > 1 for name in ids),
            wrong=await self._wrong(key, jobs, ids, statuses),
            wait_p50=_percentile(waits, 0.5),
            wait_p95=_percentile(waits, 0.95),
            utilisation=gpu_servers.busy(servers, began[0], began[-1]) if began else 0.0,
            crowded=tuple(
                name
                for name, slots in servers.items()
                if gpu_servers.servers[name].most_at_once > slots
            ),
            ledger=stats.ledger,
        )

    async def _statuses(self, key: str, ids: Sequence[str]) -> list[TaskStatus | None]:
        statuses: list[TaskStatus | None] = []
        for start in range(0, len(ids), LIMITS.batch):
            statuses += await self._control.statuses(key, *ids[start : start + LIMITS.batch])
        return statuses

    async def _wrong(
        self,
        key: str,
        jobs: Sequence[PlannedJob],
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
        for model_plan in self._plan.models:
            ids = [
                self._clients.ids[job.key] for job in self._plan.jobs if job.name == model_plan.name
            ]
            statuses = await self._statuses(queue_of(model_plan.model), ids)
            ended |= {status.task_id for status in statuses if status and status.state in _ENDS}
        return ended

    async def _reasons(self) -> dict[str, int]:
        """Count the dead letters by their reason."""
        dead_letters = dead_letters_of(self._server.backend)
        reasons: Counter[str] = Counter()
        for model_plan in self._plan.models:
            matches = await dead_letters.list(queue_of(model_plan.model), limit=LIMITS.batch)
            reasons.update(dead_letter.reason for dead_letter in matches)
        return dict(reasons)


def _percentile(values: Sequence[float], share: float) -> float:
    """Return the value that the share of sorted values does not exceed; 0 for none."""
    return values[max(0, math.ceil(share * len(values)) - 1)] if values else 0.0

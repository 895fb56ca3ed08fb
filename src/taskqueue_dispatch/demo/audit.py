"""The audit of a demo run: compares the store with what the servers ran and with a direct computation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec

from taskqueue_core.capabilities import dead_letters_of
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import State
from taskqueue_dispatch.demo.clients import Clients
from taskqueue_dispatch.demo.faults import Faults
from taskqueue_dispatch.demo.gpu_servers import GpuServers
from taskqueue_dispatch.demo.plan import DemoOptions, ModelPlan, answer_of
from taskqueue_dispatch.demo.report import (
    Callbacks,
    Crash,
    DispatchDemoReport,
    FalseReport,
    ModelReport,
)
from taskqueue_dispatch.names import queue_of

T = TypeVar("T")


class DemoAudit:
    """Collects the figures of the report after all jobs have ended."""

    def __init__(self, clients: Clients, gpu_servers: GpuServers) -> None:
        self._clients = clients
        self._gpu_servers = gpu_servers
        self._server, self._plan = clients.server, clients.plan
        self._control = self._server.dispatcher.control
        self._ended: set[str] = set()

    async def report(
        self, options: DemoOptions, faults: Faults, seconds: float
    ) -> DispatchDemoReport:
        """Read the store and return the report."""
        plan, receiver = self._plan, self._server.receiver
        models = [await self._of_model(model) for model in plan.models]
        pool = await self._server.dispatcher.pool.inspect()
        expected = {self._clients.ids[job.key] for job in plan.jobs if job.callback}
        return DispatchDemoReport(
            backend=options.backend,
            seed=options.seed,
            models=tuple(models),
            outcomes=dict(self._clients.outcomes),
            resent=self._clients.resent,
            crash=Crash(
                server=plan.crashes,
                running=len(faults.crashed),
                recovered=len(faults.crashed & self._ended),
            ),
            false_report=FalseReport(server=plan.false_reporter, denied=len(faults.denied)),
            poison=sum(job.fails < 0 for job in plan.jobs),
            reasons=await self._reasons(),
            callbacks=Callbacks(
                expected=len(expected),
                delivered=len(expected & receiver.ended.keys()),
                refused=len(receiver.refused),
                forged=receiver.forged,
            ),
            held=sum(info.assigned + info.detached for info in pool.endpoints),
            seconds=seconds,
        )

    async def _of_model(self, model: ModelPlan) -> ModelReport:
        jobs, gpu_servers = self._plan.jobs_of(model.name), self._gpu_servers
        ids = [self._clients.ids[job.key] for job in jobs]
        key = queue_of(model.model)
        stats = await self._control.stats(key)
        statuses = await _in_batches(self._control.statuses, key, ids)
        results = await _in_batches(self._control.results, key, ids)
        states = [None if status is None else status.state for status in statuses]
        ended = {task_id for task_id, state in zip(ids, states, strict=True) if state in _ENDS}
        self._ended |= ended
        began = {
            task_id: gpu_servers.began[task_id] for task_id in ids if task_id in gpu_servers.began
        }
        waits = sorted(max(0.0, at - self._clients.confirmed[name]) for name, at in began.items())
        slots = {
            machine.name: machine.slots[model.name]
            for machine in self._plan.machines
            if model.name in machine.slots
        }
        return ModelReport(
            name=model.name,
            mode=model.answer_mode,
            slots=sum(slots.values()),
            jobs=len(jobs),
            done=states.count(State.DONE),
            failed=states.count(State.DEAD),
            retried=stats.retried,
            redelivered=stats.redelivered,
            lost=len(ids) - len(ended),
            duplicates=sum(gpu_servers.ended[task_id] > 1 for task_id in ids),
            wrong=sum(
                state is State.DONE
                and (result is None or msgspec.json.decode(result) != answer_of(job.prompt))
                for job, state, result in zip(jobs, states, results, strict=True)
            ),
            wait_p50=_percentile(waits, 0.5),
            wait_p95=_percentile(waits, 0.95),
            utilisation=(
                gpu_servers.busy(slots, min(began.values()), max(began.values())) if began else 0.0
            ),
            crowded=tuple(
                name for name, n in slots.items() if gpu_servers.servers[name].most_at_once > n
            ),
            ledger=stats.ledger,
        )

    async def _reasons(self) -> dict[str, int]:
        """Return the number of dead letters by reason."""
        dead_letters = dead_letters_of(self._server.backend)
        reasons: Counter[str] = Counter()
        for model in self._plan.models:
            listed = await dead_letters.list(queue_of(model.model), limit=LIMITS.batch)
            reasons.update(dead_letter.reason for dead_letter in listed)
        return dict(reasons)


_ENDS = {State.DONE, State.DEAD}
"""the states in which the jobs of a run end"""


async def _in_batches(
    call: Callable[..., Awaitable[tuple[T, ...]]], key: str, ids: Sequence[str]
) -> list[T]:
    values: list[T] = []
    for start in range(0, len(ids), LIMITS.batch):
        values += await call(key, *ids[start : start + LIMITS.batch])
    return values


def _percentile(values: Sequence[float], share: float) -> float:
    """Return the value that a share of the sorted values does not exceed; 0 if there are no values."""
    return values[max(0, math.ceil(share * len(values)) - 1)] if values else 0.0

"""The steps of the dispatcher's demo."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec

from taskqueue_cli.demo_frame.run import wait_until
from taskqueue_cli.demo_frame.view import PlainView
from taskqueue_core.concurrency import wait_forever
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import State
from taskqueue_dispatch.demo.clients import Clients
from taskqueue_dispatch.demo.gpu_servers import GpuServers
from taskqueue_dispatch.demo.plan import (
    CRASHES,
    FALSE_REPORTER,
    DemoOptions,
    DispatchDemoPlan,
    ModelPlan,
    answer_of,
    make_plan,
)
from taskqueue_dispatch.demo.progress import JobsProgress, ModelRow, heading
from taskqueue_dispatch.demo.report import (
    Callbacks,
    Crash,
    DispatchDemoReport,
    FalseReport,
    ModelReport,
)
from taskqueue_dispatch.demo.server import DemoServer, serve_during
from taskqueue_dispatch.names import queue_of
from taskqueue_dispatch.registry import endpoint_state

_STALL_SECONDS = 30.0
_ENDS = {State.DONE, State.DEAD}
"""the states in which the jobs of a run end"""
T = TypeVar("T")


async def run_demo(options: DemoOptions, view: PlainView) -> None:
    """Run the demo. When this returns, raises or is cancelled, everything that it started has ended.

    Raises `ConfigurationError`, and `DemoFailed` if the run cannot be finished.
    """
    plan = make_plan(options.jobs, options.seed)

    async def work(server: DemoServer) -> None:
        async with GpuServers(plan, server.url) as gpu_servers:
            view.event(f"dispatcher and dashboard at {server.url}/dispatch")
            view.end(await _Run(server, plan, gpu_servers, view).run(options))
            if options.keep_going:
                view.event(f"the server keeps running at {server.url} until Ctrl-C")
                await wait_forever()

    with view.begin(heading(options, plan)):
        await serve_during(options, work)


class _Run:
    """One run of the demo, from the registration of the servers to the report."""

    def __init__(
        self, server: DemoServer, plan: DispatchDemoPlan, gpu_servers: GpuServers, view: PlainView
    ) -> None:
        self._dispatcher, self._receiver = server.dispatcher, server.receiver
        self._plan = plan
        self._gpu_servers = gpu_servers
        self._view = view
        self._clients = Clients(server, plan)
        self._names = {model.model: name for name, model in plan.models.items()}
        self._ended = 0

    async def run(self, options: DemoOptions) -> DispatchDemoReport:
        clients, gpu_servers, total = self._clients, self._gpu_servers, len(self._plan.jobs)
        await self._register()
        slots = sum(server.slots for server in gpu_servers.servers.values())
        self._view.event(
            f"{len(gpu_servers.servers)} servers with {slots} slots registered, all healthy"
        )
        began = time.monotonic()
        submitting = asyncio.create_task(clients.submit())
        failing = asyncio.create_task(
            gpu_servers.inject_faults(lambda: self._ended / total, self._view)
        )

        def finished(progress: JobsProgress) -> bool:
            for task in (submitting, failing):
                if task.done():
                    task.result()
            return progress.ended == total and submitting.done()

        try:
            await self._until(finished)
        finally:
            for task in (submitting, failing):
                task.cancel()
            await asyncio.gather(submitting, failing, return_exceptions=True)
        seconds = time.monotonic() - began
        callbacks = sum(job.callback for job in self._plan.jobs)
        await self._until(lambda progress: progress.callbacks >= callbacks)
        await self._until(lambda progress: not progress.busy)
        self._view.event("every job has ended, and every callback was delivered")
        return await self._audit(options, seconds)

    async def _register(self) -> None:
        """Register models and servers, and wait until all endpoints are healthy."""
        registry, plan = self._dispatcher.registry, self._plan
        for model in plan.models.values():
            await registry.configure(model.model, model.config)
        endpoints = [
            (name, *item) for name, slots in plan.machines.items() for item in slots.items()
        ]
        for name, model_name, slots_there in endpoints:
            url = self._gpu_servers.servers[name].url
            await registry.register(plan.models[model_name].model, name, url, slots_there)
        await self._until(
            lambda progress: (
                [endpoint_state(info, progress.now)[0] for info in progress.endpoints]
                == ["ready"] * len(endpoints)
            )
        )

    async def _until(self, reached: Callable[[JobsProgress], bool]) -> None:
        await wait_until(
            self._read,
            reached,
            lambda progress: (progress.endpoints, progress.ended, progress.callbacks),
            stall_seconds=_STALL_SECONDS,
        )

    async def _read(self) -> JobsProgress:
        dispatcher, replace = self._dispatcher, msgspec.structs.replace
        models = [
            ModelRow(
                name=name,
                jobs=len(self._plan.jobs_of(name)),
                stats=await dispatcher.control.stats(queue_of(model.model)),
            )
            for name, model in self._plan.models.items()
        ]
        endpoints = [
            replace(info, endpoint=replace(info.endpoint, model=self._names[info.endpoint.model]))
            for info in (await dispatcher.pool.inspect()).endpoints
            if info.endpoint.model in self._names
        ]
        progress = JobsProgress(
            endpoints=tuple(sorted(endpoints, key=lambda info: info.endpoint.server)),
            models=tuple(models),
            now=dispatcher.backend.now(),
            callbacks=len(self._receiver.ended),
        )
        self._ended = progress.ended
        self._view.update(progress)
        return progress

    async def _audit(self, options: DemoOptions, seconds: float) -> DispatchDemoReport:
        """Compare the store with the runs on the servers and with the expected results, and return the report."""
        plan, dispatcher, receiver = self._plan, self._dispatcher, self._receiver
        clients, gpu_servers = self._clients, self._gpu_servers
        reasons: Counter[str] = Counter()
        for model in plan.models.values():
            listed = await dispatcher.dead_letters.list(queue_of(model.model), limit=LIMITS.batch)
            reasons.update(dead_letter.reason for dead_letter in listed)
        expected = {clients.ids[job.key] for job in plan.jobs if job.callback}
        pool = await dispatcher.pool.inspect()
        ended: set[str] = set()
        models = [await self._audit_model(model, ended) for model in plan.models.values()]
        return DispatchDemoReport(
            backend=options.backend,
            seed=options.seed,
            models=tuple(models),
            outcomes=dict(clients.outcomes),
            resent=clients.resent,
            crash=Crash(
                server=CRASHES,
                running=len(gpu_servers.crashed),
                recovered=len(gpu_servers.crashed & ended),
            ),
            false_report=FalseReport(server=FALSE_REPORTER, denied=len(gpu_servers.denied)),
            poison=sum(job.fails < 0 for job in plan.jobs),
            reasons=dict(reasons),
            callbacks=Callbacks(
                expected=len(expected),
                delivered=len(expected & receiver.ended.keys()),
                refused=len(receiver.refused),
                forged=receiver.forged,
            ),
            held=sum(info.assigned + info.detached for info in pool.endpoints),
            seconds=seconds,
        )

    async def _audit_model(self, model: ModelPlan, ended: set[str]) -> ModelReport:
        """Return the figures of a model, and add the ids of its ended jobs to ``ended``."""
        jobs, gpu_servers = self._plan.jobs_of(model.name), self._gpu_servers
        control, key = self._dispatcher.control, queue_of(model.model)
        ids = [self._clients.ids[job.key] for job in jobs]
        stats = await control.stats(key)
        statuses = await _in_batches(control.statuses, key, ids)
        results = await _in_batches(control.results, key, ids)
        states = [None if status is None else status.state for status in statuses]
        own = {task_id for task_id, state in zip(ids, states, strict=True) if state in _ENDS}
        ended |= own
        began = {
            task_id: gpu_servers.began[task_id] for task_id in ids if task_id in gpu_servers.began
        }
        waits = sorted(max(0.0, at - self._clients.confirmed[name]) for name, at in began.items())
        slots = {
            name: slots[model.name]
            for name, slots in self._plan.machines.items()
            if model.name in slots
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
            lost=len(ids) - len(own),
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


async def _in_batches(
    call: Callable[..., Awaitable[tuple[T, ...]]], key: str, ids: Sequence[str]
) -> list[T]:
    values: list[T] = []
    for start in range(0, len(ids), LIMITS.batch):
        values += await call(key, *ids[start : start + LIMITS.batch])
    return values


def _percentile(values: Sequence[float], share: float) -> float:
    """Return the value that the given share of the sorted values does not exceed, or 0 if there are no values."""
    return values[max(0, math.ceil(share * len(values)) - 1)] if values else 0.0

"""The steps of the dispatcher's demo."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from taskqueue_cli.demo_frame.run import wait_until
from taskqueue_cli.demo_frame.view import PlainView
from taskqueue_dispatch.dashboard.formatting import state_of
from taskqueue_dispatch.demo.audit import DemoAudit
from taskqueue_dispatch.demo.clients import Clients
from taskqueue_dispatch.demo.faults import Faults
from taskqueue_dispatch.demo.gpu_servers import GpuServers
from taskqueue_dispatch.demo.plan import DemoOptions, make_plan
from taskqueue_dispatch.demo.progress import JobsProgress, ModelRow, heading
from taskqueue_dispatch.demo.report import DispatchDemoReport
from taskqueue_dispatch.demo.server import opened
from taskqueue_dispatch.names import queue_of

_STALL_SECONDS = 30.0


async def run_demo(options: DemoOptions, view: PlainView) -> None:
    """Run the demo. When this returns, raises or is cancelled, everything that it started has ended.

    Raises `DemoFailed` if the run cannot be finished, and `ConfigurationError`.
    """
    plan = make_plan(options.jobs, options.seed)
    with view.begin(heading(options, plan)):
        async with opened(options) as server, GpuServers(plan, server.url) as gpu_servers:
            view.event(f"dispatcher and dashboard at {server.url}/dispatch")
            async with Clients(server, plan) as clients:
                report = await _Run(clients, gpu_servers, view).run(options)
            view.end(report)
            if options.keep_going:
                view.event(f"the server keeps running at {server.url} until Ctrl-C")
                await asyncio.Event().wait()


class _Run:
    def __init__(self, clients: Clients, gpu_servers: GpuServers, view: PlainView) -> None:
        self._clients = clients
        self._gpu_servers = gpu_servers
        self._view = view
        self._server, self._plan = clients.server, clients.plan
        self._names = {model.model: model.name for model in self._plan.models}
        self._ended = 0

    async def run(self, options: DemoOptions) -> DispatchDemoReport:
        clients, gpu_servers, plan = self._clients, self._gpu_servers, self._plan
        await clients.register(gpu_servers.servers)
        await self._until(self._healthy)
        slots = sum(plan.slots(model.name) for model in plan.models)
        self._view.event(
            f"{len(gpu_servers.servers)} servers with {slots} slots registered, all healthy"
        )
        began = time.monotonic()
        faults = Faults(plan, gpu_servers, self._view)
        submitting = asyncio.create_task(clients.submit())
        failing = asyncio.create_task(faults.run(lambda: self._ended / len(plan.jobs)))

        def finished(progress: JobsProgress) -> bool:
            for task in (submitting, failing):
                if task.done():
                    task.result()
            return progress.ended == len(plan.jobs) and submitting.done()

        try:
            await self._until(finished)
        finally:
            for task in (submitting, failing):
                task.cancel()
            await asyncio.gather(submitting, failing, return_exceptions=True)
        seconds = time.monotonic() - began
        await self._until(lambda progress: progress.callbacks >= plan.callbacks)
        await self._until(
            lambda progress: not any(i.assigned + i.detached for i in progress.endpoints)
        )
        self._view.event("every job has ended, and every callback was delivered")
        return await DemoAudit(clients, gpu_servers).report(options, faults, seconds)

    async def _until(self, reached: Callable[[JobsProgress], bool]) -> None:
        await wait_until(
            self._read,
            reached,
            lambda progress: (progress.endpoints, progress.ended, progress.callbacks),
            stall_seconds=_STALL_SECONDS,
        )

    async def _read(self) -> JobsProgress:
        dispatcher = self._server.dispatcher
        models = tuple(
            [
                ModelRow(
                    name=model.name,
                    jobs=len(self._plan.jobs_of(model.name)),
                    stats=await dispatcher.control.stats(queue_of(model.model)),
                )
                for model in self._plan.models
            ]
        )
        replace = msgspec.structs.replace
        endpoints = [
            replace(info, endpoint=replace(info.endpoint, model=self._names[info.endpoint.model]))
            for info in (await dispatcher.pool.inspect()).endpoints
            if info.endpoint.model in self._names
        ]
        progress = JobsProgress(
            endpoints=tuple(sorted(endpoints, key=lambda info: info.endpoint.server)),
            models=models,
            now=self._server.backend.now(),
            callbacks=len(self._server.receiver.ended),
        )
        self._ended = progress.ended
        self._view.update(progress)
        return progress

    def _healthy(self, progress: JobsProgress) -> bool:
        expected = sum(len(machine.slots) for machine in self._plan.machines)
        states = [state_of(info, progress.now)[0] for info in progress.endpoints]
        return states == ["ready"] * expected

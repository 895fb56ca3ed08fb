"""The demonstration, step by step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from taskqueue_cli.demo.cluster import DemoFailed
from taskqueue_dispatch.demo.audit import DemoAudit
from taskqueue_dispatch.demo.clients import Clients
from taskqueue_dispatch.demo.faults import Faults
from taskqueue_dispatch.demo.gpu_servers import GpuServers
from taskqueue_dispatch.demo.plan import DemoOptions, DispatchDemoPlan, make_plan
from taskqueue_dispatch.demo.report import DispatchDemoReport
from taskqueue_dispatch.demo.server import DemoServer, opened
from taskqueue_dispatch.demo.view import ModelRow, SlotTable, View, racks_of
from taskqueue_dispatch.names import queue_of

_TICK = 0.1
_STALL = 30.0


async def run_demo(
    options: DemoOptions, view: View, reported: Callable[[DispatchDemoReport], None]
) -> None:
    """Run it and report. Everything that was started has ended when this returns, raises or is cancelled.

    Raises `DemoFailed` where it cannot be finished, and `ConfigurationError`.
    """
    plan = make_plan(options.jobs, options.seed)
    with view:
        view.begin(options, plan)
        async with opened(options) as server, GpuServers(plan, server.url) as gpu_servers:
            view.event(f"dispatcher and dashboard at {server.url}/dispatch")
            async with Clients(server, plan) as clients:
                report = await _Run(server, plan, gpu_servers, clients, view).run(options)
            view.end(report)
            reported(report)
            if options.keep_going:
                view.event(f"the server stays at {server.url} until Ctrl-C")
                await asyncio.Event().wait()


class _Run:
    def __init__(
        self,
        server: DemoServer,
        plan: DispatchDemoPlan,
        gpu_servers: GpuServers,
        clients: Clients,
        view: View,
    ) -> None:
        self._server = server
        self._plan = plan
        self._gpu_servers = gpu_servers
        self._clients = clients
        self._view = view
        self._names = {model.model: model.name for model in plan.models}

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
        ill = asyncio.create_task(faults.run(lambda: self._ended / len(plan.jobs)))

        def over(board: SlotTable) -> bool:
            for task in (submitting, ill):
                if task.done():
                    task.result()
            return self._all_ended(board) and submitting.done()

        try:
            await self._until(over)
        finally:
            for task in (submitting, ill):
                task.cancel()
            await asyncio.gather(submitting, ill, return_exceptions=True)
        seconds = time.monotonic() - began
        await self._until(self._all_callbacks_delivered)
        await self._until(self._all_free)
        self._view.event("every job has ended, and every callback was delivered")
        account = DemoAudit(self._server, plan, gpu_servers, clients)
        return await account.report(options, faults, seconds)

    async def _until(self, reached: Callable[[SlotTable], bool]) -> None:
        moved, since = None, time.monotonic()
        while True:
            board = await self._read_table()
            self._view.update(board)
            if reached(board):
                return
            if (now := (board.rows, self._ended, board.callbacks)) != moved:
                moved, since = now, time.monotonic()
            elif time.monotonic() - since > _STALL:
                raise DemoFailed(f"nothing has moved for {_STALL:g} s")
            await asyncio.sleep(_TICK)

    async def _read_table(self) -> SlotTable:
        dispatcher, lines = self._server.dispatcher, []
        for model in self._plan.models:
            stats = await dispatcher.control.stats(queue_of(model.model))
            lines.append(
                ModelRow(
                    name=model.name,
                    jobs=self._clients.wanted(model.name),
                    ledger=stats.ledger,
                    retried=stats.retried,
                    redelivered=stats.redelivered,
                )
            )
        self._ended = sum(line.ended for line in lines)
        now = self._server.backend.now()
        return SlotTable(
            rows=racks_of(await dispatcher.pool.inspect(), self._names, now),
            lines=tuple(lines),
            callbacks=len(self._server.receiver.ended),
        )

    def _healthy(self, board: SlotTable) -> bool:
        there = sum(len(server.slots) for server in self._plan.machines)
        return len(board.rows) == there and not any(row.state for row in board.rows)

    def _all_ended(self, board: SlotTable) -> bool:
        return all(line.ended == line.jobs for line in board.lines)

    def _all_callbacks_delivered(self, board: SlotTable) -> bool:
        return board.callbacks >= self._clients.with_callback

    @staticmethod
    def _all_free(board: SlotTable) -> bool:
        return not any(row.running + row.detached + row.overdue for row in board.rows)

    _ended = 0

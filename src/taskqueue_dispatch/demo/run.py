"""The demonstration, step by step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from taskqueue_cli.demo.cluster import DemoFailed
from taskqueue_dispatch.demo.audit import Account
from taskqueue_dispatch.demo.clients import Clients
from taskqueue_dispatch.demo.faults import Misfortunes
from taskqueue_dispatch.demo.gpu_servers import Works
from taskqueue_dispatch.demo.plan import DemoOptions, Plan, make_plan
from taskqueue_dispatch.demo.report import Report
from taskqueue_dispatch.demo.server import Site, opened
from taskqueue_dispatch.demo.view import Board, Line, View, racks_of
from taskqueue_dispatch.names import queue_of

__all__ = ["run_demo"]

_TICK = 0.1
_STALL = 30.0


async def run_demo(options: DemoOptions, view: View, reported: Callable[[Report], None]) -> None:
    """Run it and report. Everything that was started has ended when this returns, raises or is cancelled.

    Raises `DemoFailed` where it cannot be finished, and `ConfigurationError`.
    """
    plan = make_plan(options.jobs, options.seed)
    with view:
        view.begin(options, plan)
        async with opened(options) as site, Works(plan, site.url) as works:
            view.event(f"dispatcher and dashboard at {site.url}/dispatch")
            async with Clients(site, plan) as clients:
                report = await _Run(site, plan, works, clients, view).run(options)
            view.end(report)
            reported(report)
            if options.keep_going:
                view.event(f"the server stays at {site.url} until Ctrl-C")
                await asyncio.Event().wait()


class _Run:
    def __init__(self, site: Site, plan: Plan, works: Works, clients: Clients, view: View) -> None:
        self._site = site
        self._plan = plan
        self._works = works
        self._clients = clients
        self._view = view
        self._names = {one.model: one.name for one in plan.manners}

    async def run(self, options: DemoOptions) -> Report:
        clients, works, plan = self._clients, self._works, self._plan
        await clients.register(works.servers)
        await self._until(self._healthy)
        slots = sum(plan.slots(one.name) for one in plan.manners)
        self._view.event(f"{len(works.servers)} servers with {slots} slots registered, all healthy")
        began = time.monotonic()
        misfortunes = Misfortunes(plan, works, self._view)
        submitting = asyncio.create_task(clients.submit())
        ill = asyncio.create_task(misfortunes.run(lambda: self._ended / len(plan.jobs)))

        def over(board: Board) -> bool:
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
        await self._until(self._all_told)
        await self._until(self._all_free)
        self._view.event("every job has ended, and every callback was delivered")
        account = Account(self._site, plan, works, clients)
        return await account.report(options, misfortunes, seconds)

    async def _until(self, reached: Callable[[Board], bool]) -> None:
        moved, since = None, time.monotonic()
        while True:
            board = await self._look()
            self._view.update(board)
            if reached(board):
                return
            if (now := (board.racks, self._ended, board.callbacks)) != moved:
                moved, since = now, time.monotonic()
            elif time.monotonic() - since > _STALL:
                raise DemoFailed(f"nothing has moved for {_STALL:g} s")
            await asyncio.sleep(_TICK)

    async def _look(self) -> Board:
        dispatcher, lines = self._site.dispatcher, []
        for one in self._plan.manners:
            stats = await dispatcher.control.stats(queue_of(one.model))
            lines.append(
                Line(
                    name=one.name,
                    jobs=self._clients.wanted(one.name),
                    ledger=stats.ledger,
                    retried=stats.retried,
                    redelivered=stats.redelivered,
                )
            )
        self._ended = sum(line.ended for line in lines)
        now = self._site.backend.now()
        return Board(
            racks=racks_of(await dispatcher.pool.look(), self._names, now),
            lines=tuple(lines),
            callbacks=len(self._site.receiver.ended),
        )

    def _healthy(self, board: Board) -> bool:
        there = sum(len(site.slots) for site in self._plan.machines)
        return len(board.racks) == there and not any(rack.state for rack in board.racks)

    def _all_ended(self, board: Board) -> bool:
        return all(line.ended == line.jobs for line in board.lines)

    def _all_told(self, board: Board) -> bool:
        return board.callbacks >= self._clients.with_callback

    @staticmethod
    def _all_free(board: Board) -> bool:
        return not any(rack.running + rack.detached + rack.overdue for rack in board.racks)

    _ended = 0

"""The demonstration, step by step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from taskqueue_cli.demo.check import compare
from taskqueue_cli.demo.cluster import Cluster, DemoFailed
from taskqueue_cli.demo.journals import JournalKeeper, find_journal_keeper, prepare_journal_file
from taskqueue_cli.demo.plan import DemoOptions, DemoPlan, make_plan
from taskqueue_cli.demo.report import Killed, Report
from taskqueue_cli.demo.view import View
from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.queue import Queue
from taskqueue_core.retry import RetryPolicy
from taskqueue_core.tasks import Published, QueueStats, State, Task

_BATCH = 200
_FIRST_SHARE = 0.6
"""the share that is published before the kill; the rest is there for the workers to hold then"""
_DONE_BEFORE_KILL = 0.5
_POLL_SECONDS = 0.1
_STALL_SECONDS = 60.0
_RETRY = RetryPolicy(base=0.2, cap=1.0)
_RESULT_TTL_SECONDS = 86_400.0


async def run_demo(options: DemoOptions, view: View, reported: Callable[[Report], None]) -> None:
    """Run it and report. Every process that was started has ended when this returns, raises or is cancelled.

    Raises `InvalidInput` where there are no files, and `DemoFailed` where it cannot be finished.
    """
    plan = await asyncio.to_thread(make_plan, options.path, options.limit)
    with view:
        view.begin(options, plan)
        path, keeper = _journal(options, view)
        variables = keeper.variables(path) if keeper and path else {}
        async with Cluster(
            plan.key, options.backend, embedded=options.embedded, variables=variables
        ) as cluster:
            server = await cluster.start_server()
            store = cluster.store_name
            store_note = f", with an embedded store for this run ({store})" if store else ""
            view.event(f"server and dashboard at {cluster.url} (pid {server.pid}){store_note}")
            for child in await asyncio.gather(
                *(cluster.start_worker() for _ in range(options.workers))
            ):
                view.event(f"{child.name} connected (pid {child.pid})")
            job = _Job(cluster, plan, view, journal=keeper is not None)
            report = await job.run(options)
            if keeper and path:
                await keeper.keep_journal(plan.key, path, job.began_at, cluster.store)
                report = msgspec.structs.replace(report, journal=path)
            view.end(report)
            reported(report)
            if options.keep_going:
                view.event(f"the server keeps running at {cluster.url} until Ctrl-C")
                await cluster.run_until_cancelled()


def _journal(options: DemoOptions, view: View) -> tuple[Path | None, JournalKeeper | None]:
    if options.journal is None:
        return None, None
    path = prepare_journal_file(options.journal)
    keeper = find_journal_keeper(options.backend)
    if keeper is None:
        view.event(
            f"no journal is written: the backend {options.backend} cannot export one", "yellow"
        )
    return path, keeper


class _Job:
    """The tasks of one run, from the first publish to the account."""

    def __init__(self, cluster: Cluster, plan: DemoPlan, view: View, *, journal: bool) -> None:
        self._cluster = cluster
        self._plan = plan
        self._view = view
        self._control = cluster.backend.control
        self._queue = Queue(cluster.backend)
        self._duplicates = 0
        self._journal = journal
        self.began_at = cluster.backend.now()
        """by the store's clock"""

    async def run(self, options: DemoOptions) -> Report:
        key, total = self._plan.key, self._plan.total
        settings = await self._control.settings(key)
        update = {"retry": _RETRY, "result_ttl": _RESULT_TTL_SECONDS, "journal": self._journal}
        changed: QueueSettings = settings.model_copy(update=update)
        await self._control.configure(key, changed)

        tasks = list(self._plan.tasks())
        part = max(1, round(total * _FIRST_SHARE))
        began = time.monotonic()
        await self._publish(tasks[:part])
        resent = tasks[: min(part, _BATCH)]
        await self._publish(resent)
        self._view.event(
            f"published the first {len(resent):,} tasks twice: {self._duplicates:,} duplicates"
        )
        enough = min(part - 1, round(total * _DONE_BEFORE_KILL))
        await self._wait_until(lambda stats: stats.ledger.done >= enough)
        killed = await self._kill_and_replace_worker(tasks[part:])
        stats = await self._wait_until(lambda stats: _count_ended(stats) >= total)
        seconds = time.monotonic() - began

        comparison = await compare(self._control, self._plan, self._view.comparing)
        return Report(
            plan=self._plan,
            backend=options.backend,
            workers=options.workers,
            stats=stats,
            duplicates=self._duplicates,
            resent=len(resent),
            killed=killed,
            comparison=comparison,
            dead=await self._cluster.backend.dead_letters.list(key),
            seconds=seconds,
        )

    async def _kill_and_replace_worker(self, rest: Sequence[Task]) -> Killed:
        """Kill a worker that holds deliveries for certain, and put another in its place."""
        self._cluster.pause_workers()
        await self._publish(rest[:_BATCH])  # no more: a worker that is silent for long is given up
        victim, held = await self._cluster.kill_busiest_worker()
        self._view.event(
            f"{victim.name} killed (SIGKILL, pid {victim.pid}) while holding {held:,} deliveries",
            "red",
        )
        replacement = await self._cluster.start_worker()
        self._view.event(f"{replacement.name} replaced it (pid {replacement.pid})")
        await self._publish(rest[_BATCH:])
        return Killed(worker=victim.name, pid=victim.pid, held=held, replacement=replacement.name)

    async def _publish(self, tasks: Sequence[Task]) -> None:
        for start in range(0, len(tasks), _BATCH):
            confirmations = await self._queue.publish_many(tasks[start : start + _BATCH])
            for confirmation in confirmations:
                if not confirmation.stored:
                    raise DemoFailed(f"a task was not stored: {confirmation.reason}")
                self._duplicates += confirmation.status is Published.DUPLICATE
            await self._read_stats()

    async def _read_stats(self) -> QueueStats:
        self._cluster.check()
        stats = await self._control.stats(self._plan.key)
        self._view.update(stats)
        return stats

    async def _wait_until(self, reached: Callable[[QueueStats], bool]) -> QueueStats:
        moved, since = 0, time.monotonic()
        while True:
            stats = await self._read_stats()
            if reached(stats):
                return stats
            if (now := stats.delivered + _count_ended(stats)) != moved:
                moved, since = now, time.monotonic()
            elif time.monotonic() - since > _STALL_SECONDS:
                raise DemoFailed(f"no progress for {_STALL_SECONDS:g} s")
            await asyncio.sleep(_POLL_SECONDS)


def _count_ended(stats: QueueStats) -> int:
    return sum(getattr(stats.ledger, state.value) for state in State if not state.live)

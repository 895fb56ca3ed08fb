"""The steps of a demo run, from starting the server to the report."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from taskqueue_cli.backends import find_journal_keeper
from taskqueue_cli.demo.check import compare
from taskqueue_cli.demo.job import KEY_VARIABLE
from taskqueue_cli.demo.plan import DemoOptions, DemoPlan, make_plan
from taskqueue_cli.demo.progress import JobProgress, count_ended, heading
from taskqueue_cli.demo.report import Killed, Report
from taskqueue_cli.demo_frame.run import DemoFailed, wait_until
from taskqueue_cli.demo_frame.server import Cluster
from taskqueue_cli.demo_frame.view import PlainView
from taskqueue_core.errors import ConfigurationError
from taskqueue_core.queue import Queue
from taskqueue_core.retry import RetryPolicy
from taskqueue_core.tasks import Published, QueueStats, Task

_BATCH = 200
_FIRST_SHARE = 0.6
"""share of the tasks that are published first; some of the others are published while the workers are paused"""
_DONE_BEFORE_KILL = 0.5
_STALL_SECONDS = 60.0
_RETRY = RetryPolicy(base=0.2, cap=1.0)
_RESULT_TTL_SECONDS = 86_400.0


async def run_demo(options: DemoOptions, view: PlainView) -> None:
    """Run the demo. All its processes have ended when this function returns, raises an exception or is cancelled.

    Raises `InvalidInput` if there are no files, and `DemoFailed` if the run cannot be finished.
    """
    plan = await asyncio.to_thread(make_plan, options.path, options.limit)
    with view.begin(heading(options, plan)):
        path = prepare_journal_file(options.journal) if options.journal else None
        keeper = find_journal_keeper(options.backend) if path else None
        if path and keeper is None:
            view.event(
                f"no journal is written: the backend {options.backend} cannot export one", "yellow"
            )
        async with Cluster(
            plan.key,
            options.backend,
            "taskqueue_cli.demo.job:worker",
            embedded=options.embedded,
            variables={KEY_VARIABLE: plan.key},
            server_variables=keeper.variables(path) if keeper and path else {},
        ) as cluster:
            server = await cluster.start_server()
            ready = cluster.ready
            store = (
                f", with an embedded store for this run ({ready.embedded})"
                if ready.embedded
                else ""
            )
            view.event(f"server and dashboard at {ready.url} (pid {server.process.pid}){store}")
            starts = (cluster.start_worker() for _ in range(options.workers))
            for child in await asyncio.gather(*starts):
                view.event(f"{child.name} connected (pid {child.process.pid})")
            began_at = cluster.backend.now()
            report = await _Job(cluster, plan, view).run(options, journal=keeper is not None)
            if keeper and path:
                await keeper.keep_journal(plan.key, path, began_at, ready.store)
                report = msgspec.structs.replace(report, journal=path)
            view.end(report)
            if options.keep_going:
                view.event(f"the server keeps running at {ready.url} until Ctrl-C")
                while True:
                    cluster.check()
                    await asyncio.sleep(1)


class _Job:
    """The tasks of one run, from the first publish to the report."""

    def __init__(self, cluster: Cluster, plan: DemoPlan, view: PlainView) -> None:
        self._cluster = cluster
        self._plan = plan
        self._view = view
        self._progress = JobProgress(plan)
        self._control = cluster.backend.control
        self._queue = Queue(cluster.backend)
        self._duplicates = 0

    async def run(self, options: DemoOptions, *, journal: bool) -> Report:
        key, total = self._plan.key, self._plan.total
        settings = await self._control.settings(key)
        changes = {"retry": _RETRY, "result_ttl": _RESULT_TTL_SECONDS, "journal": journal}
        await self._control.configure(key, settings.model_copy(update=changes))

        tasks = list(self._plan.tasks())
        part = max(1, round(total * _FIRST_SHARE))
        began = time.monotonic()
        await self._publish(tasks[:part])
        resent = tasks[: min(part, _BATCH)]
        await self._publish(resent)
        self._view.event(
            f"tasks published twice: {len(resent):,}; duplicates found: {self._duplicates:,}"
        )
        enough = min(part - 1, round(total * _DONE_BEFORE_KILL))
        await self._wait_until(lambda stats: stats.ledger.done >= enough)
        killed = await self._kill_and_replace_worker(tasks[part:])
        stats = await self._wait_until(lambda stats: count_ended(stats) >= total)
        seconds = time.monotonic() - began

        comparison = await compare(self._control, self._plan, self._show_compared)
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
        """Kill a worker while it holds deliveries, and start another in its place."""
        self._cluster.signal_workers(signal.SIGSTOP)
        # Publish only one batch now, because the server closes the connection of a worker that is paused for long.
        await self._publish(rest[:_BATCH])
        victim, held = await self._cluster.kill_busiest_worker()
        self._view.event(
            f"{victim.name} killed (SIGKILL, pid {victim.process.pid}); deliveries that it held: {held:,}",
            "red",
        )
        replacement = await self._cluster.start_worker()
        self._view.event(
            f"{replacement.name} started as a replacement (pid {replacement.process.pid})"
        )
        await self._publish(rest[_BATCH:])
        return Killed(
            worker=victim.name, pid=victim.process.pid, held=held, replacement=replacement.name
        )

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
        self._progress.update(stats)
        self._view.update(self._progress)
        return stats

    async def _wait_until(self, reached: Callable[[QueueStats], bool]) -> QueueStats:
        return await wait_until(
            self._read_stats,
            reached,
            lambda stats: stats.delivered + count_ended(stats),
            stall_seconds=_STALL_SECONDS,
        )

    def _show_compared(self, count: int) -> None:
        self._progress.compared = count
        self._view.update(self._progress)


def prepare_journal_file(path: Path) -> Path:
    """Create the folder of a journal file, and delete an earlier journal. Raises `ConfigurationError`."""
    path = path.expanduser().absolute()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"--journal: {path} cannot be written: {error.strerror or type(error).__name__}"
        ) from None
    return path

"""The jobs of one GPU server: running jobs, waiting direct jobs, and recently ended jobs."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from functools import partial
from typing import Any

import msgspec

from taskqueue_core.errors import InvalidInput
from taskqueue_core.json_text import encode_json
from taskqueue_core.limits import LIMITS

_MAX_STORED = 64 * 1024 * 1024
"""maximum total size of stored results in bytes"""
_OVER = "the server has shut down"
_CANCELLED = "cancelled"
_log = logging.getLogger("taskqueue.gpu")


class JobFailed(Exception):
    """The error that a handler raises if a job failed. The client gets its text. Another attempt may succeed."""


class JobRefused(Exception):
    """The error that a handler raises if a job can never succeed. The client gets its text."""


class GpuJobPhase(StrEnum):
    """The state of a job, as ``/status`` reports it."""

    QUEUED = "queued"
    PROCESSING = "processing"
    SUCCESS = "success"
    FAILED = "failed"


class GpuJob:
    """One job, as the handler receives it."""

    def __init__(self, job_id: str, payload: Any, *, attempt: int, direct: bool) -> None:
        self.id = job_id
        self.payload = payload
        self.attempt = attempt
        """number of the attempt, starting at 1"""
        self.direct = direct
        """whether the job comes from a direct caller, not from a dispatcher"""
        self.switched = False
        """whether the server's previous job was for another model, so that this model may have to be loaded"""
        self.progress: float | str | None = None
        """progress that ``/status`` reports while the job runs; the handler sets it"""
        self.token: str | None = None
        self.digest = b""
        self.phase = GpuJobPhase.QUEUED
        self.result = b""
        self.error = ""
        self.refused = False
        self.cancelled = False
        self.ended = asyncio.Event()
        self.ended_at = 0.0

    def report(self) -> bytes:
        """Return the status of the job as JSON text, with its result, error or progress."""
        fields: dict[str, Any] = {"status": self.phase, "job_id": self.id}
        if self.phase is GpuJobPhase.SUCCESS:
            fields["result"] = msgspec.Raw(self.result)
        elif self.phase is GpuJobPhase.FAILED:
            fields |= {"error": self.error, "final": self.refused}
        elif self.progress is not None:
            fields["progress"] = self.progress
        return msgspec.json.encode(fields)


Handler = Callable[[GpuJob], Any | Awaitable[Any]]
"""Function that returns the result of a job as a value for JSON. A synchronous function runs in a thread."""


class GpuJobs:
    """The jobs of a server: a limited number runs at once, and direct jobs are queued.

    Use it in one event loop only.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        max_concurrent: int,
        direct_queue: int,
        keep_seconds: float,
        keep_count: int,
        on_end: Callable[[GpuJob], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._handler = handler
        self._plain = not (
            inspect.iscoroutinefunction(handler)
            or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004 - the handler may be an object with ``__call__``
        )
        self._threads = ThreadPoolExecutor(max_concurrent, "gpu") if self._plain else None
        self._max = max_concurrent
        self._direct = direct_queue
        self._keep_seconds, self._keep_count = keep_seconds, keep_count
        self._on_end = on_end
        self._now = now
        self._waiting: deque[GpuJob] = deque()
        self._ended: dict[str, GpuJob] = {}
        self._finished = 0
        self._tasks: dict[GpuJob, asyncio.Task[None]] = {}
        self.active: dict[str, GpuJob] = {}
        """running jobs by id"""

    @property
    def busy(self) -> bool:
        """Whether a job of a dispatcher is refused, because all slots are in use or direct jobs wait."""
        return len(self.active) >= self._max or bool(self._waiting)

    @property
    def full(self) -> bool:
        """Whether a direct job is refused, because the queue of direct jobs is full."""
        return len(self.active) >= self._max and len(self._waiting) >= self._direct

    def find(self, job_id: str) -> GpuJob | None:
        """Return a running, waiting or recently ended job, or ``None`` if the id is unknown."""
        self._forget()
        result = self.active.get(job_id) or self._ended.get(job_id)
        return result or next((job for job in self._waiting if job.id == job_id), None)

    def position(self, job: GpuJob) -> int:
        """Return the position of a direct job in the queue, starting at 1, or 0 if the job no longer waits."""
        return self._waiting.index(job) + 1 if job in self._waiting else 0

    def add(self, job: GpuJob) -> None:
        """Run a job as soon as a slot is free, which is at once if `busy` is false."""
        self._drop(job.id)
        self._waiting.append(job)
        self._go_on()

    def cancel(self, job: GpuJob) -> bool:
        """Cancel a job. Return False if it has ended, or if its handler runs in a thread, which cannot be cancelled."""
        if job in self._waiting:
            self._waiting.remove(job)
            self._fail(job, _CANCELLED)
            self._store(job)
            self._on_end(job)
            return True
        task = self._tasks.get(job)
        if task is None or self._threads is not None:
            return False
        job.cancelled = True
        return task.cancel()

    async def aclose(self) -> None:
        """Cancel running jobs and drop waiting ones.

        A synchronous function continues in its thread; its result is ignored.
        """
        self._waiting.clear()
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _go_on(self) -> None:
        while self._waiting and len(self.active) < self._max:
            job = self._waiting.popleft()
            job.phase = GpuJobPhase.PROCESSING
            self.active[job.id] = job
            task = self._tasks[job] = asyncio.create_task(self._run(job))
            task.add_done_callback(partial(self._ran, job))

    def _ran(self, job: GpuJob, _: asyncio.Task[None]) -> None:
        del self._tasks[job]
        # A task that is cancelled before its first step does not mark its job as ended.
        if self.active.get(job.id) is job:
            self._fail(job, _CANCELLED if job.cancelled else _OVER)
            self._end(job)

    async def _run(self, job: GpuJob) -> None:
        try:
            if self._threads is None:
                result = await self._handler(job)
            else:
                loop = asyncio.get_running_loop()
                result = await loop.run_in_executor(self._threads, self._handler, job)
            job.result = encode_json("result", result)
            job.phase = GpuJobPhase.SUCCESS
        except (JobFailed, JobRefused) as failure:
            self._fail(job, str(failure), refused=isinstance(failure, JobRefused))
        except InvalidInput as error:
            self._fail(job, f"the handler's result is {error.got}; allowed: {error.allowed}")
        except asyncio.CancelledError:
            self._fail(job, _CANCELLED if job.cancelled else _OVER)
            raise
        except Exception as error:  # noqa: BLE001 - a handler may raise any exception
            # Report only the type of the error, because its text may contain data of the client.
            _log.exception("a job has failed", extra={"job_id": job.id})
            self._fail(job, f"the model has failed ({type(error).__name__})")
        finally:
            self._end(job)

    def _end(self, job: GpuJob) -> None:
        del self.active[job.id]
        self._store(job)
        self._go_on()
        self._on_end(job)

    def _store(self, job: GpuJob) -> None:
        job.payload, job.ended_at = None, self._now()
        self._ended[job.id] = job
        self._finished += len(job.result)
        self._forget()
        job.ended.set()

    @staticmethod
    def _fail(job: GpuJob, error: str, *, refused: bool = False) -> None:
        job.phase, job.error, job.refused = GpuJobPhase.FAILED, error[: LIMITS.text], refused

    def _forget(self) -> None:
        old = self._now() - self._keep_seconds
        while self._ended:
            job_id, job = next(iter(self._ended.items()))
            many = len(self._ended) > self._keep_count or self._finished > _MAX_STORED
            if not many and job.ended_at > old:
                return
            self._drop(job_id)

    def _drop(self, job_id: str) -> None:
        job = self._ended.pop(job_id, None)
        if job is not None:
            self._finished -= len(job.result)

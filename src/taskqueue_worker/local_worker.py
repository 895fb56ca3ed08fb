"""A worker that needs no server: it works on a store that it can reach itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Self

from taskqueue_core.assembly import open_backend
from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import dead_letters_of
from taskqueue_core.limits import LIMITS
from taskqueue_worker.base import BaseWorker
from taskqueue_worker.local_source import LocalTaskSource
from taskqueue_worker.quarantine import Quarantine
from taskqueue_worker.run import TaskSource, WorkerRun


class LocalWorker(BaseWorker):
    """Runs tasks of the keys that have a handler, straight from a backend's subscription, as a `Worker` does.

    ``backend`` is one that exists (it is left open at the end), or a name, or none for the configured one. It must be
    able to keep dead letters. Where it has no ``control``, the default retry policy holds, progress goes nowhere and
    nobody keeps house here; where it has no ``revocation``, what was cancelled runs to its end.

    At most ``concurrency`` tasks run at once. While they run more are fetched, up to ``prefetch`` (by default as many
    again), but no more than should start within 50 ms going by how many ended lately; what waits longer than a second
    goes back. The other options are those of a `Worker`.

    A coroutine handler shares the event loop with the backend: one that blocks it holds up everything here.
    """

    def __init__(
        self,
        backend: str | Backend | None = None,
        *,
        worker_id: str | None = None,
        concurrency: int = 100,
        prefetch: int | None = None,
        grace: float = 10.0,
        quarantine: Callable[[], Quarantine] = Quarantine,
    ) -> None:
        """Do no input or output. Raises `ConfigurationError`."""
        self._backend = backend
        self._requested_prefetch = prefetch
        super().__init__(
            worker_id=worker_id,
            concurrency=concurrency,
            prefetch=self._prefetch_for(concurrency),
            grace=grace,
            quarantine=quarantine,
        )

    @classmethod
    def of(cls, worker: BaseWorker, backend: str | Backend | None = None) -> Self:
        """Return a worker with the handlers and options of another one but its ``prefetch``, on ``backend``."""
        local = cls(
            backend,
            worker_id=worker._worker_id,  # noqa: SLF001 - both are workers
            concurrency=worker._concurrency,  # noqa: SLF001 - as above
            grace=worker._grace,  # noqa: SLF001 - as above
            quarantine=worker._quarantine,  # noqa: SLF001 - as above
        )
        local._handlers = worker._handlers  # noqa: SLF001 - as above
        return local

    def configure(
        self,
        *,
        worker_id: str | None = None,
        concurrency: int | None = None,
        backend: str | Backend | None = None,
    ) -> None:
        """Change options before serving; ``None`` leaves one as it is. Raises `ConfigurationError`."""
        prefetch = None if concurrency is None else self._prefetch_for(concurrency)
        self._configure(worker_id, concurrency, prefetch)
        if backend is not None:
            self._backend = backend

    def _prefetch_for(self, concurrency: int) -> int:
        if self._requested_prefetch is not None:
            return self._requested_prefetch
        return max(0, min(concurrency, LIMITS.credit - concurrency))

    @asynccontextmanager
    async def _open_source(
        self, worker_id: str
    ) -> AsyncIterator[Callable[[WorkerRun], TaskSource]]:
        configured = self._backend
        backend = open_backend(configured) if isinstance(configured, str | None) else configured
        try:
            dead_letters_of(backend)  # learn now, not with the first task that is given up
            yield lambda run: LocalTaskSource(
                backend,
                backend.subscribe(self.keys, worker_id),
                run,
                concurrency=self._concurrency,
                capacity=self._concurrency + self._prefetch,
            )
        finally:
            if isinstance(configured, str | None):
                await backend.aclose()

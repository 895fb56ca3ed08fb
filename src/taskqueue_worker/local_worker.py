"""A worker that receives its tasks directly from a backend, without a server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Self

from taskqueue_core.application.registry import Tasks
from taskqueue_core.backend import Backend, Subscription
from taskqueue_core.capabilities import dead_letters_of
from taskqueue_core.config import Settings, load_settings
from taskqueue_core.limits import LIMITS
from taskqueue_core.queue import connect
from taskqueue_worker.base import BaseWorker, WorkerLink
from taskqueue_worker.local_source import LocalTaskSource
from taskqueue_worker.quarantine import Quarantine
from taskqueue_worker.run import WorkerRun


class LocalWorker(BaseWorker):
    """A worker that receives the tasks of the registries ``tasks`` directly from a backend, without a server.

    ``backend`` is a backend object, the name of a backend, or ``None`` for the configured backend. A backend object is
    not closed when the worker stops. The backend must support dead letters. If it does not support ``control``, the
    default retry policy applies, progress is not stored, and this worker runs no maintenance. If it does not support
    ``revocation``, the handlers of cancelled tasks are not interrupted.

    At most ``concurrency`` tasks run at once. Up to ``prefetch`` further tasks, by default ``concurrency``, are
    received in advance, but only as many as should start within 50 ms at the current rate. If the rate drops, the tasks
    that still wait after about a second are released. The other options are those of `Worker`.

    If the backend is visible to this process only, as the memory backend is, the worker applies the policies of its
    tasks when it starts, because nothing else can; see `taskqueue_core.Tasks.apply` for other backends.

    Coroutine handlers share the event loop with the backend, so a handler must not block the loop.

    >>> worker = LocalWorker(tasks, backend=backend, concurrency=10)
    >>> worker.keys
    ('shop.resize', 'shop.charge', 'shop.remind', 'shop.refund', 'shop.measure', 'shop.describe')
    """

    def __init__(
        self,
        *tasks: Tasks,
        backend: str | Backend | None = None,
        worker_id: str | None = None,
        concurrency: int = 100,
        prefetch: int | None = None,
        grace: float = 10.0,
        quarantine: Callable[[], Quarantine] = Quarantine,
    ) -> None:
        """Store the options without any I/O. Raises `ConfigurationError` if an option is invalid."""
        self._backend = backend
        self._requested_prefetch = prefetch
        super().__init__(
            tasks,
            worker_id=worker_id,
            concurrency=concurrency,
            prefetch=self._prefetch_for(concurrency),
            grace=grace,
            quarantine=quarantine,
        )

    @classmethod
    def of(cls, worker: BaseWorker, backend: str | Backend | None = None) -> Self:
        """Return a local worker with the handlers and options of another worker, except its ``prefetch``."""
        local = cls(
            *worker._tasks,  # noqa: SLF001 - an attribute of the common base class
            backend=backend,
            worker_id=worker._worker_id,  # noqa: SLF001 - an attribute of the common base class
            concurrency=worker._concurrency,  # noqa: SLF001 - an attribute of the common base class
            grace=worker._grace,  # noqa: SLF001 - an attribute of the common base class
            quarantine=worker._quarantine,  # noqa: SLF001 - an attribute of the common base class
        )
        local._tasks_per_child = worker._tasks_per_child  # noqa: SLF001 - an attribute of the common base class
        local.target = worker.target
        local._only = worker._only  # noqa: SLF001 - an attribute of the common base class
        return local

    def configure(
        self,
        *,
        worker_id: str | None = None,
        concurrency: int | None = None,
        only: Collection[str] | None = None,
        apply: bool | None = None,
        tasks_per_child: int | None = None,
        backend: str | Backend | None = None,
    ) -> None:
        """Change the options that are not ``None``. Raises `ConfigurationError` during a run, or if one is invalid."""
        prefetch = None if concurrency is None else self._prefetch_for(concurrency)
        super().configure(
            worker_id=worker_id, only=only, apply=apply, tasks_per_child=tasks_per_child
        )
        self._configure(None, concurrency, prefetch)
        if backend is not None:
            self._backend = backend

    def _prefetch_for(self, concurrency: int) -> int:
        if self._requested_prefetch is not None or type(concurrency) is not int:
            return self._requested_prefetch or 0
        return max(0, min(concurrency, LIMITS.credit - concurrency))

    @property
    def source(self) -> str:
        backend = self._backend
        if backend is None:
            backend = load_settings(Settings).backend
        return f"the backend {backend if isinstance(backend, str) else type(backend).__name__}"

    @asynccontextmanager
    async def _open_source(self, worker_id: str) -> AsyncIterator[WorkerLink]:
        async with connect(self._backend) as queue:
            backend = queue.backend
            dead_letters_of(backend)  # raises an error now, instead of at the first dead letter

            def source(run: WorkerRun) -> LocalTaskSource:
                return self._create_source(backend, backend.subscribe(self.keys, worker_id), run)

            # Another process cannot use a backend object, or a store that lives in this process.
            options = None
            if backend.capabilities.shared and isinstance(self._backend, str | None):
                options = {"backend": self._backend}
            yield WorkerLink(source, True, lambda: queue, options)  # noqa: FBT003 - fields of a struct

    def _create_source(
        self, backend: Backend, subscription: Subscription, run: WorkerRun
    ) -> LocalTaskSource:
        return LocalTaskSource(
            backend,
            subscription,
            run,
            concurrency=self._concurrency,
            capacity=self._concurrency + self._prefetch,
        )

"""A worker that receives its tasks from a server."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path

from pydantic import SecretStr

from taskqueue_core.application.registry import Tasks
from taskqueue_core.assembly import open_backend
from taskqueue_core.client_security import check_token, trusting, warn_if_readable
from taskqueue_core.config import Settings, load_settings
from taskqueue_core.protocol.client_session import ClientSession, Revoked
from taskqueue_core.queue import Queue
from taskqueue_core.server_address import ServerAddress
from taskqueue_core.telemetry import consumed
from taskqueue_worker.base import BaseWorker, WorkerLink
from taskqueue_worker.quarantine import Quarantine
from taskqueue_worker.run import WorkerRun
from taskqueue_worker.server_link import Backoff, ServerLink, Work
from taskqueue_worker.threads import ThreadsafeInbox


class Worker(BaseWorker):
    """A worker that receives its tasks from a server, for all tasks of the registries ``tasks`` and of `task`.

    A task is acked after its execution, so a task whose worker crashes is executed again.

    ``url``, ``token`` and ``tls_ca`` default to the settings ``TASKQUEUE_SERVER_URL``, ``TASKQUEUE_TOKEN`` and
    ``TASKQUEUE_TLS_CA``. ``tls_ca`` is a PEM file with the certificate authorities to trust, instead of those of the
    system. ``worker_id`` defaults to a unique id. At most ``concurrency`` tasks run at once, and up to ``prefetch``
    further deliveries wait in this process. ``grace`` is the number of seconds that running handlers have to finish
    when the worker stops. ``quarantine`` creates the rule by which a worker whose attempts all fail stops receiving.
    ``uniform`` returns random numbers (0 <= x < 1) for the delays between attempts to connect.

    Handlers publish, and read results, through the HTTP API of the same server, with the same token; the connection is
    opened when a handler uses it for the first time. `serve` and `run` also raise `WorkerRefused` if the server refuses
    this worker.

    >>> worker = Worker(tasks, url="http://127.0.0.1:8420", concurrency=10)
    >>> worker.source
    'http://127.0.0.1:8420'
    """

    def __init__(
        self,
        *tasks: Tasks,
        url: str | None = None,
        worker_id: str | None = None,
        concurrency: int = 10,
        prefetch: int = 0,
        grace: float = 10.0,
        token: str | SecretStr | None = None,
        tls_ca: Path | str | None = None,
        quarantine: Callable[[], Quarantine] = Quarantine,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        """Store the options without any I/O. Raises `ConfigurationError` if an option is invalid."""
        super().__init__(
            tasks,
            worker_id=worker_id,
            concurrency=concurrency,
            prefetch=prefetch,
            grace=grace,
            quarantine=quarantine,
        )
        self._address = None if url is None else ServerAddress.of(url)
        self._token = token.get_secret_value() if isinstance(token, SecretStr) else token
        check_token(self._token)
        self._tls_ca = tls_ca
        self._uniform = uniform

    def configure(
        self,
        *,
        worker_id: str | None = None,
        concurrency: int | None = None,
        only: Collection[str] | None = None,
        apply: bool | None = None,
        tasks_per_child: int | None = None,
        url: str | None = None,
    ) -> None:
        """Change the options that are not ``None``. Raises `ConfigurationError` during a run, or if one is invalid."""
        super().configure(
            worker_id=worker_id,
            concurrency=concurrency,
            only=only,
            apply=apply,
            tasks_per_child=tasks_per_child,
        )
        if url is not None:
            self._address = ServerAddress.of(url)

    @property
    def source(self) -> str:
        return (self._address or ServerAddress.of(load_settings(Settings).server_url)).shown

    @asynccontextmanager
    async def _open_source(self, worker_id: str) -> AsyncIterator[WorkerLink]:
        address, token, tls_ca = self._address, self._token, self._tls_ca
        if address is None or token is None or tls_ca is None:
            settings = load_settings(Settings)
            address = address or ServerAddress.of(settings.server_url)
            token = token or (settings.token.get_secret_value() if settings.token else None)
            tls_ca = tls_ca or settings.tls_ca
        check_token(token)
        warn_if_readable(address.shown, token, loopback=address.loopback)
        tls = trusting(tls_ca)
        # If the URL contains a user name and a password, they are sent in the Authorization header. Then the token is
        # sent in the hello frame instead.
        header, hello = (None, token) if address.has_credentials else (token, None)
        capacity = self._concurrency + self._prefetch
        session = ClientSession(worker_id, self.keys, capacity, hello)

        def connect(run: WorkerRun) -> ServerLink:
            def handle(batch: list[Work]) -> None:
                for work in batch:
                    if isinstance(work, Revoked):
                        run.runner.revoke(work.receipts)
                    else:
                        consumed([delivery.task for delivery in work.deliveries])
                        run.runner.deliver(work.deliveries)

            inbox: ThreadsafeInbox[Work] = ThreadsafeInbox(asyncio.get_running_loop(), handle)
            backoff = Backoff(uniform=self._uniform)
            return ServerLink(
                session, address, backoff, inbox.put, run.set_connected, token=header, tls=tls
            )

        connection = _LazyQueue(address.http_base, token, tls_ca)
        try:
            options = {
                "backend": "server",
                "url": address.http_base,
                "token": token,
                "tls_ca": None if tls_ca is None else str(tls_ca),
            }
            yield WorkerLink(connect, False, connection.open, options)  # noqa: FBT003 - fields of a struct
        finally:
            await connection.aclose()


class _LazyQueue:
    """A connection to a server's HTTP API, which is opened when a handler uses it for the first time."""

    def __init__(self, url: str, token: str | None, tls_ca: Path | str | None) -> None:
        self._options = {"url": url, "token": token, "tls_ca": tls_ca}
        self._queue: Queue | None = None
        self._lock = threading.Lock()

    def open(self) -> Queue:
        with self._lock:
            if self._queue is None:
                self._queue = Queue(open_backend("server", server=self._options))
            return self._queue

    async def aclose(self) -> None:
        if self._queue is not None:
            await self._queue.backend.aclose()

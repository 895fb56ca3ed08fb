"""The worker: handlers, a connection that outlives failures, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import secrets
import signal
import socket
from collections.abc import Callable
from math import isfinite
from typing import TypeVar

from pydantic import SecretStr

from taskqueue_core.config import Settings, load_settings
from taskqueue_core.errors import ConfigurationError, InvalidInput
from taskqueue_core.limits import LIMITS, check_name
from taskqueue_core.protocol.client_session import ClientSession
from taskqueue_core.worker.address import Address
from taskqueue_core.worker.backoff import Backoff
from taskqueue_core.worker.link import Link
from taskqueue_core.worker.quarantine import Quarantine
from taskqueue_core.worker.registry import Registry
from taskqueue_core.worker.shift import Shift

__all__ = ["Worker"]

F = TypeVar("F", bound=Callable[..., object])
_log = logging.getLogger("taskqueue.worker")


class Worker:
    """Runs tasks of the keys that have a handler. A task is acked after it was executed: it may run more than once.

    ``url`` and ``token`` default to the settings (``TASKQUEUE_SERVER_URL``, ``TASKQUEUE_TOKEN``). ``worker_id``
    defaults to one that no other start has. At most ``concurrency`` handlers run at once; ``prefetch`` more deliveries
    may wait here. ``grace`` is how many seconds running handlers get when the worker stops. ``quarantine`` makes the
    rule by which a worker that only fails stops taking work; ``uniform`` (0 <= x < 1) jitters reconnects.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        worker_id: str | None = None,
        concurrency: int = 10,
        prefetch: int = 0,
        grace: float = 10.0,
        token: str | SecretStr | None = None,
        quarantine: Callable[[], Quarantine] = Quarantine,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        """Do no input or output. Raises `ConfigurationError`."""
        if not (isfinite(grace) and grace >= 0):
            raise ConfigurationError("grace is a number of seconds from 0 on")
        self._address: Address | None = None
        self._worker_id: str | None = None
        self._concurrency = 0
        self._prefetch = prefetch
        self._grace = grace
        self._token = token.get_secret_value() if isinstance(token, SecretStr) else token
        self._quarantine = quarantine
        self._uniform = uniform
        self._registry = Registry()
        self._shift: Shift | None = None
        self.configure(url=url, worker_id=worker_id, concurrency=concurrency)

    def configure(
        self,
        *,
        url: str | None = None,
        worker_id: str | None = None,
        concurrency: int | None = None,
    ) -> None:
        """Change options before serving; ``None`` leaves one as it is. Raises `ConfigurationError`."""
        if self._shift is not None:
            raise ConfigurationError("this worker is serving already")
        if concurrency is not None:
            if (
                concurrency < 1
                or self._prefetch < 0
                or concurrency + self._prefetch > LIMITS.credit
            ):
                raise ConfigurationError(
                    f"concurrency must be at least 1 and, with prefetch, at most {LIMITS.credit}"
                )
            self._concurrency = concurrency
        if worker_id is not None:
            try:
                check_name("worker_id", worker_id)
            except InvalidInput as error:
                raise ConfigurationError(str(error)) from error
            self._worker_id = worker_id
        if url is not None:
            self._address = Address.of(url)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that have a handler."""
        return self._registry.keys

    def task(self, key: str | None = None, *, timeout: float | None = None) -> Callable[[F], F]:
        """Register the decorated function for ``key`` (its own name by default) and return it unchanged.

        ``async`` functions run in the event loop, others in threads. After ``timeout`` seconds the attempt fails: an
        async handler is cancelled; a synchronous one cannot be, so it keeps its slot until it ends. Raises
        `ConfigurationError`.
        """

        def register(function: F) -> F:
            name = key if key is not None else getattr(function, "__name__", "")
            self._registry.add(name, function, timeout)
            return function

        return register

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT, whose second one hands back everything at once. Call it in the main thread.

        Raises what `serve` raises.
        """
        asyncio.run(self._run())

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, self._signalled)
        try:
            await self.serve()
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def _signalled(self) -> None:
        again = self._shift is not None and self._shift.stopping
        _log.info(
            "handing back everything"
            if again
            else "stopping; a second signal hands back everything"
        )
        self.stop(now=again)

    async def serve(self) -> None:
        """Serve until `stop`. Cancelling it hands back everything.

        Raises `WorkerRefused` where the server will not have this worker, `WorkerQuarantined` where its handlers only
        fail, and again what a handler raised to end the process (`SystemExit`, `KeyboardInterrupt`).
        """
        if self._shift is not None:
            raise ConfigurationError("this worker is serving already")
        if not self.keys:
            raise ConfigurationError("this worker has no handlers: register some with @worker.task")
        address, token = self._address, self._token
        if address is None or token is None:
            settings = load_settings(Settings)
            address = address or Address.of(settings.server_url)
            token = token or (settings.token.get_secret_value() if settings.token else None)
        worker_id = self._worker_id or _unique_id()
        capacity = self._concurrency + self._prefetch
        session = ClientSession(worker_id, self.keys, capacity, token)
        self._shift = shift = Shift(
            self._registry, self._quarantine(), self._concurrency, capacity, self._grace
        )
        try:
            await shift.work(
                lambda deliver: Link(session, address, Backoff(uniform=self._uniform), deliver)
            )
        finally:
            self._shift = None

    def stop(self, *, now: bool = False) -> None:
        """Have `serve` end: running handlers get the grace, or none with ``now``. May be called from any thread.

        Without effect unless serving.
        """
        shift = self._shift
        if shift is not None:
            shift.stop(now=now)


def _unique_id() -> str:
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).strip(".-_")[:100] or "host"
    return f"{host}-{os.getpid()}-{secrets.token_hex(4)}"

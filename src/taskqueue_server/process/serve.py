"""``taskqueue serve``: run the application on a port, from startup to shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any

import uvicorn

from taskqueue_core.assembly import open_backend
from taskqueue_core.backend import Backend
from taskqueue_core.concurrency import first_completed
from taskqueue_core.config import Settings
from taskqueue_core.consumer.outage import log_fields
from taskqueue_core.errors import ConfigurationError, TaskQueueError
from taskqueue_core.hooks import Hooks
from taskqueue_core.instrumented import InstrumentedBackend
from taskqueue_core.limits import LIMITS
from taskqueue_core.logs import set_up_logs
from taskqueue_server.app import create_app
from taskqueue_server.auth.access import check_host, notice
from taskqueue_server.auth.tls import server_context
from taskqueue_server.context.server import ServerContext
from taskqueue_server.process import systemd
from taskqueue_server.process.listeners import listen, url_of
from taskqueue_server.process.reload import Reread, adopt, reload, rereader, signals
from taskqueue_server.process.uvicorn_protocols import HttpProtocol, SocketProtocol, TlsProtocol
from taskqueue_server.routing.extensions import Extension, load_extensions
from taskqueue_server.worker_socket.uvicorn_protocol import (
    ACCEPTS_PER_TURN,
    BACKLOG,
    raise_descriptor_limit,
)

_STORE_SECONDS = 5.0
_LEFT_OVER_SECONDS = 0.3
"""seconds to send the last responses before open connections are aborted"""
_FORCED_SECONDS = 0.5
"""seconds that an immediate shutdown waits for open requests, and then for the application"""
_log = logging.getLogger("taskqueue.server")


def serve(
    settings: Settings,
    backend_word: str | None = None,
    *,
    on_ready: Callable[[str], None] | None = None,
    given: Mapping[str, Any] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then let workers settle their tasks; a second signal stops at once.

    ``on_ready`` gets the URL once connections are accepted. With ``given``, SIGHUP reads the settings again, and the
    settings in ``given`` override what was read. Raises `ConfigurationError` for invalid settings, and `TaskQueueError`
    if several processes are configured and one of them keeps failing.
    """
    set_up_logs(form=settings.log_format)
    raise_descriptor_limit()
    read = None if given is None else rereader(given)
    if settings.processes > 1:
        from taskqueue_server.process.supervisor import Processes  # noqa: PLC0415 - the supervisor is not needed for one process

        asyncio.run(Processes(settings, backend_word, on_ready=on_ready, read=read).run())
        return
    server = ServerProcess(
        open_backend(backend_word, settings), settings, on_ready=on_ready, read=read
    )
    asyncio.run(server.run())


class ServerProcess:
    """One server in this process, which owns its backend. Call `run` only once."""

    def __init__(
        self,
        backend: Backend,
        settings: Settings,
        *,
        on_ready: Callable[[str], None] | None = None,
        read: Reread | None = None,
        listener: socket.socket | None = None,
        extensions: Sequence[Extension] = (),
    ) -> None:
        """Create a server. Raises `ConfigurationError` as `check_host` does, and for invalid TLS files or extensions.

        ``extensions`` are added to those in the settings. With ``read``, SIGHUP reads the settings again. ``listener``
        is the bound socket of one of several processes; in that case, a second signal does not stop the server at once,
        because the supervisor decides that.
        """
        hooks = backend.hooks if isinstance(backend, InstrumentedBackend) else Hooks()
        check_host(settings, hooks)
        self._notice = notice(settings, hooks)
        self._tls = server_context(settings)
        self._settings = settings
        self._backend = backend
        self._on_ready = on_ready
        self._read = read
        self._listener = listener
        self._extensions = (*load_extensions(settings.extensions), *extensions)
        self._uvicorn: _UvicornServer | None = None
        self._stop_requests = 0
        self.url = ""
        """the server's URL; empty before the server listens"""
        self.ready = asyncio.Event()
        self.context: ServerContext | None = None

    async def run(self) -> None:
        """Serve until `stop`, or until a signal if this is the main thread.

        Raises what `create_app` and `listen` raise, and `ConfigurationError` if the store cannot be used with the
        settings of this server. If the store is only unavailable, the server starts.
        """
        try:
            app = create_app(self._backend, self._settings, self._extensions)
        except BaseException:
            await self._backend.aclose()
            raise
        self.context = context = app.state.context
        self._uvicorn = uvicorn_server = _UvicornServer(app, context, self._accepting, self._tls)
        for _ in range(self._stop_requests):
            uvicorn_server.ask_to_stop()
        try:
            await _check_store(context)
            listener = self._listener or listen(self._settings)
        except BaseException:  # an application that was not started does not close the backend
            await context.backend.aclose()
            raise
        end = self.stop if self._listener is None else self.stop_once
        with listener, systemd.watched(), signals(end, self._reload if self._read else None):
            self.url = url_of(listener, secure=self._tls is not None)
            await uvicorn_server.serve([listener])

    def stop(self) -> None:
        """Stop gracefully; the second call stops at once."""
        if not self._stop_requests:
            systemd.stopping()
        self._stop_requests += 1
        if self._uvicorn is not None:
            self._uvicorn.ask_to_stop()

    def stop_once(self) -> None:
        """Stop gracefully, unless that was requested before."""
        if not self._stop_requests:
            self.stop()

    def adopt(self, settings: Settings) -> None:
        """Apply changed settings to the running server."""
        if self.context is not None:
            adopt(self.context, settings, self._tls)

    def _reload(self) -> None:
        if self.context is not None and self._read is not None:
            reload(self.context, self._read, self._tls)

    def _accepting(self) -> None:
        _log.info("serving", extra={"url": self.url})
        if self._notice:
            _log.log(*self._notice)
        self.ready.set()
        systemd.ready(f"at {self.url}")
        if self._on_ready is not None:
            self._on_ready(self.url)


class _UvicornServer(uvicorn.Server):
    def __init__(
        self,
        app: object,
        context: ServerContext,
        accepting: Callable[[], None],
        tls: ssl.SSLContext | None,
    ) -> None:
        proxies = sorted(context.settings.trusted_proxies)
        http = (
            partial(HttpProtocol, context.unauthenticated)
            if tls is None
            else partial(TlsProtocol, context.unauthenticated, tls)
        )
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]
                http=http,  # type: ignore[arg-type]
                ws=SocketProtocol,
                ws_max_size=LIMITS.frame,
                ws_per_message_deflate=False,
                ws_ping_interval=None,  # the worker protocol has ping frames of its own
                backlog=ACCEPTS_PER_TURN,
                lifespan="on",
                log_config=None,
                access_log=False,
                proxy_headers=bool(proxies),
                forwarded_allow_ips=proxies,
                server_header=False,
                timeout_graceful_shutdown=1,
            )
        )
        self._context = context
        self._accepting = accepting
        self._forced = asyncio.Event()

    def ask_to_stop(self) -> None:
        if self.should_exit:
            self.force_exit = True
            self._forced.set()
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield  # ServerProcess handles signals

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit:
            if self._context.startup_error is not None:
                raise self._context.startup_error from None
            raise
        for listener in sockets or ():
            listener.listen(BACKLOG)  # asyncio has set the backlog to `ACCEPTS_PER_TURN`
        if self.started and not self.should_exit:
            self._accepting()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        await first_completed(self._leave(), self._forced.wait())
        self._context.unauthenticated.close()
        for connection in list(self.server_state.connections):
            if self.server_state.tasks or connection.transport.get_write_buffer_size():
                connection.transport.abort()  # a connection in use would delay the shutdown
        if self.force_exit and self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=_FORCED_SECONDS)
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn does not end the lifespan after a forced exit
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FORCED_SECONDS):
                    await self.lifespan.shutdown()

    async def _leave(self) -> None:
        await self._context.drain()
        if self.server_state.tasks:
            await asyncio.wait(
                self.server_state.tasks,
                timeout=self._context.drain_remaining + self._context.handover + _LEFT_OVER_SECONDS,
            )


async def _check_store(context: ServerContext) -> None:
    try:
        async with asyncio.timeout(_STORE_SECONDS):
            await context.control.queues()
            await context.backend.check_store()
    except ConfigurationError:
        raise
    except (TaskQueueError, TimeoutError) as error:
        _log.warning("the store does not respond yet", extra=log_fields(error))

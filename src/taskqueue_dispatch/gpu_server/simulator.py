"""A simulated GPU server for demos and tests: a real server on a port, whose model only waits."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Generator
from enum import StrEnum
from typing import Any, Self

import msgspec
import uvicorn

from taskqueue_dispatch.gpu_server.component import GpuServer, Receive, Scope, Send, respond
from taskqueue_dispatch.gpu_server.jobs import GpuJob, JobFailed

CONTROL = "/simulated"
"""path of the controls: GET returns statistics, PUT ``{"mode": …}`` sets the mode, DELETE crashes and restarts"""
_HOST = "127.0.0.1"
_CHANGE_LIMIT = 1000
_TURNS = 3
"""number of event loop iterations after which a connection that was just accepted is registered and can be closed"""
_ENDING = 1.0
"""seconds to wait for requests to end after their connections were closed"""


class Mode(StrEnum):
    """How the simulated server behaves. A change affects new requests; `FAIL` also affects jobs already running."""

    OK = "ok"
    BUSY = "busy"
    """respond to dispatchers with 503"""
    FAIL = "fail"
    """let every job run for its duration and then fail"""
    ERROR = "error"
    """respond with 500 at once, except to health checks"""
    BAD_GATEWAY = "bad_gateway"
    """respond with 502 at once, except to health checks"""
    HANG = "hang"
    """respond to no request, except to the controls"""
    SICK = "sick"
    """respond with 500 to health checks, and run jobs as usual"""
    DRIP = "drip"
    """run jobs, but respond with an endless sequence of spaces, except to health checks"""
    GARBAGE = "garbage"
    """respond with 200 and half of a JSON object at once, except to health checks"""
    FALSE_IDLE = "lie_idle"
    """report in health checks that no job is running"""
    FALSE_DONE = "lie_done"
    """report success at once without running the job"""


_HEALTH = "/health"
_LIE = b'{"status":"success","result":{"lie":true}}'
_HEALTH_ANSWERS = {
    Mode.FALSE_IDLE: (200, b'{"status":"ok","active_jobs":0,"jobs":[]}'),
    Mode.SICK: (500, b"{}"),
}
_ANSWERS = {
    Mode.ERROR: (500, b"{}"),
    Mode.BAD_GATEWAY: (502, b"{}"),
    Mode.GARBAGE: (200, b'{"status":"success","result":{"a":'),
}


class SimulatedGpu:
    """A simulated server with one model. The async context starts it in the running event loop and stops it."""

    def __init__(
        self,
        *,
        slots: int = 1,
        latency: float | tuple[float, float] = 0.02,
        asynchronous: bool = False,
        mode: Mode = Mode.OK,
        name: str = "gpu",
        port: int = 0,
        seed: int = 0,
        direct_queue: int = 10,
        dispatcher: str | None = None,
        handler: Callable[[GpuJob], Awaitable[Any]] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Create a server without any I/O.

        ``latency`` is the duration of a job in seconds, or the bounds of a uniform distribution, whose random seed is
        ``seed``. ``port`` 0 selects a free port, which is kept after crashes. ``handler`` computes results instead of
        the simulated model. ``slots`` is the ``max_concurrent`` of `GpuServer`. ``asynchronous``, ``direct_queue`` and
        ``dispatcher`` have the same meaning as there.
        """
        self.mode = mode
        self.slots = slots
        self.asynchronous = asynchronous
        self.name = name
        self.port = port
        self.latency = latency
        self.runs: Counter[str] = Counter()
        """number of times each job was started, by job id, including starts before a crash"""
        self.finished: Counter[str] = Counter()
        self.active = 0
        self.most_at_once = 0
        self.posts = 0
        """number of POST requests, which submit jobs"""
        self.refused = 0
        """number of POST requests refused with 503"""
        self.crashes = 0
        self._random = random.Random(seed)  # noqa: S311 - no secret depends on these values
        self._sleep = sleep
        self._handler = handler
        self._direct_queue = direct_queue
        self._dispatcher = dispatcher
        self._component: GpuServer | None = None
        self._program: LocalServer | None = None
        self._restarting: asyncio.Task[None] | None = None

    @property
    def origin(self) -> str:
        """Return the scheme, host and port of the server. They are valid after the first start."""
        return f"http://{_HOST}:{self.port}"

    @property
    def url(self) -> str:
        """Return the URL to which jobs are POSTed: the URL to register as the endpoint."""
        return f"{self.origin}/generate"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._restarting is not None:
            await asyncio.gather(self._restarting, return_exceptions=True)
        await self._end()

    async def start(self) -> None:
        """Start listening; after a crash, use the same port again. Do nothing if the server is running."""
        if self._program is not None:
            return
        self._component = GpuServer(
            self._run,
            max_concurrent=self.slots,
            direct_queue=self._direct_queue,
            asynchronous=self.asynchronous,
            dispatcher=self._dispatcher,
        )
        self._program = LocalServer(self._serve)
        self.port = await self._program.listen(self.port)

    async def crash(self) -> None:
        """Close every connection, forget every job, and stay down until `start`. Running jobs do not finish."""
        self.crashes += 1
        await self._end()

    async def crash_and_restart(self) -> None:
        """Crash, and restart at once without any job."""
        await self.crash()
        await self.start()

    async def _end(self) -> None:
        program, self._program = self._program, None
        component, self._component = self._component, None
        if program is not None and component is not None:
            program.cut()
            await component.aclose()
            await program.wait_closed()

    async def _run(self, job: GpuJob) -> Any:
        self.runs[job.id] += 1
        self.active += 1
        self.most_at_once = max(self.most_at_once, self.active)
        try:
            if self._handler is not None:
                result = await self._handler(job)
            else:
                await self._sleep(self._duration())
                result = {"server": self.name, "job_id": job.id, "attempt": job.attempt}
        finally:
            self.active -= 1
        if self.mode is Mode.FAIL:
            raise JobFailed("simulated")
        self.finished[job.id] += 1
        return result

    def _duration(self) -> float:
        if isinstance(self.latency, tuple):
            return self._random.uniform(*self.latency)
        return self.latency

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == CONTROL:
            await self._control(scope, receive, send)
        elif scope["method"] == "POST":
            self.posts += 1
            await self._answer(scope, receive, self._counting(send))
        else:
            await self._answer(scope, receive, send)

    def _counting(self, send: Send) -> Send:
        async def counted(message: Any) -> None:
            self.refused += message.get("status") == 503  # noqa: PLR2004 - the HTTP status of a busy server
            await send(message)

        return counted

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.mode is Mode.HANG:
            await _wait_disconnected(receive)
        elif self.mode is Mode.DRIP and scope["path"] != _HEALTH:
            if self._component is not None:
                await self._component(scope, receive, _held_back)
            await self._drip(receive, send)
        elif (instead := self._instead(scope)) is not None:
            await respond(send, *instead)
        elif self._component is not None:
            await self._component(scope, receive, send)

    def _instead(self, scope: Scope) -> tuple[int, bytes] | None:
        """Return the status and body that the mode sends instead of the application's response, or ``None``."""
        if scope["path"] == _HEALTH:
            return _HEALTH_ANSWERS.get(self.mode)
        if self.mode in _ANSWERS:
            return _ANSWERS[self.mode]
        if scope["method"] != "POST":
            return None
        if self.mode is Mode.BUSY and (b"x-source", b"dispatcher") in scope["headers"]:
            return 503, b"{}"
        return (200, _LIE) if self.mode is Mode.FALSE_DONE else None

    async def _drip(self, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_wait_disconnected(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while not gone.done():
                await send({"type": "http.response.body", "body": b" ", "more_body": True})
                await asyncio.wait([gone], timeout=0.05)
        finally:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)

    async def _control(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "PUT":
            message = await receive()
            try:
                value = msgspec.json.decode(message.get("body", b"")[:_CHANGE_LIMIT])
                self.mode = Mode(value["mode"])
            except (ValueError, KeyError, TypeError):
                names = ", ".join(Mode)
                await respond(send, 422, msgspec.json.encode({"detail": f"mode: one of {names}"}))
                return
        await respond(send, 200, msgspec.json.encode(self.statistics()))
        if scope["method"] == "DELETE" and self._restarting is None:
            self._restarting = asyncio.create_task(self._restart())

    async def _restart(self) -> None:
        try:
            await self.crash_and_restart()
        finally:
            self._restarting = None

    def statistics(self) -> dict[str, Any]:
        """Return counters such as ``runs`` by job and ``most_at_once``, as values for JSON."""
        return {
            "mode": self.mode,
            "active": self.active,
            "most_at_once": self.most_at_once,
            "posts": self.posts,
            "refused": self.refused,
            "crashes": self.crashes,
            "runs": dict(self.runs),
            "finished": dict(self.finished),
        }


class LocalServer(uvicorn.Server):
    """A server on a local port in the running event loop. It can close all its connections at once, and runs once."""

    def __init__(self, app: Any) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                interface="asgi3",
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                date_header=False,
            )
        )
        self._ready = asyncio.Event()
        self._cut = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None

    async def listen(self, port: int = 0) -> int:
        """Start accepting connections, and return the port. ``port`` 0 selects a free port."""
        listener = socket.create_server((_HOST, port), backlog=1024)
        # asyncio sets this option only on sockets that it creates itself. Without it, small responses are delayed by
        # 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        port = listener.getsockname()[1]
        self._serving = asyncio.create_task(self.serve([listener]))
        await self._ready.wait()
        return port

    def cut(self) -> None:
        """Close the port and every connection, whatever its state."""
        self.should_exit = True
        self._cut.set()
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()

    async def wait_closed(self) -> None:
        """Wait until requests have ended, for up to a second after `cut`."""
        if self._serving is not None:
            await self._serving

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the handling of signals to the surrounding program."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start as uvicorn does, and report that the server accepts connections."""
        await super().startup(sockets)
        self._ready.set()

    async def main_loop(self) -> None:
        """Wait for `cut`, instead of checking ten times per second as uvicorn does."""
        await self._cut.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002 - `cut` has closed the sockets
        """Close connections that were accepted at the last moment, and wait up to a second for running requests."""
        for _ in range(_TURNS):
            await asyncio.sleep(0)
            self.cut()
        if tasks := self.server_state.tasks:
            await asyncio.wait(tasks, timeout=_ENDING)


async def _wait_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _held_back(_: Any) -> None:
    """Discard a message instead of sending it."""

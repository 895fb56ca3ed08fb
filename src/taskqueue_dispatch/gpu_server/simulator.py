"""A simulated GPU server, for demos and tests: a real server on a port, whose model does nothing but take time."""

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
"""GET: return statistics; PUT ``{"mode": …}``: change the mode; DELETE: crash and restart at once"""
_HOST = "127.0.0.1"
_CHANGE_LIMIT = 1000
_TURNS = 3
"""of the event loop, within which a connection that was just accepted is there to be cut"""
_ENDING = 1.0
"""seconds in which requests that were cut off end"""


class Mode(StrEnum):
    """How it behaves. Jobs that run already go on."""

    OK = "ok"
    BUSY = "busy"
    """503 to every dispatcher"""
    FAIL = "fail"
    """every job fails, after its time"""
    ERROR = "error"
    """500 at once, to everything but health"""
    BAD_GATEWAY = "bad_gateway"
    """likewise 502"""
    HANG = "hang"
    """no answer, to anything"""
    SICK = "sick"
    """500 to health alone"""
    DRIP = "drip"
    """jobs run, but an answer comes byte by byte and never ends"""
    GARBAGE = "garbage"
    """200 with half of a JSON object"""
    LIE_IDLE = "lie_idle"
    """health says that nothing runs"""
    LIE_DONE = "lie_done"
    """success at once, and nothing is run"""


_HEALTH = "/health"
_LIE = b'{"status":"success","result":{"lie":true}}'
_HEALTH_ANSWERS = {
    Mode.LIE_IDLE: (200, b'{"status":"ok","active_jobs":0,"jobs":[]}'),
    Mode.SICK: (500, b"{}"),
}
_ANSWERS = {
    Mode.ERROR: (500, b"{}"),
    Mode.BAD_GATEWAY: (502, b"{}"),
    Mode.GARBAGE: (200, b'{"status":"success","result":{"a":'),
}


class SimulatedGpu:
    """One server with one model. Entering it starts it in the running event loop; leaving ends it."""

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
        """Do no input or output.

        ``latency`` is in seconds, or the bounds of an even distribution that ``seed`` begins; ``port`` 0 is any free
        one, kept over crashes; ``handler`` gives the results instead. The rest is as in `GpuServer`.
        """
        self.mode = mode
        self.slots = slots
        self.asynchronous = asynchronous
        self.name = name
        self.port = port
        self.latency = latency
        self.runs: Counter[str] = Counter()
        """how often each job was begun; over crashes too"""
        self.finished: Counter[str] = Counter()
        self.active = 0
        self.most_at_once = 0
        self.posts = 0
        """those that asked for a job to be run"""
        self.refused = 0
        """of these, by 503"""
        self.crashes = 0
        self._random = random.Random(seed)  # noqa: S311 - not for secrets
        self._sleep = sleep
        self._handler = handler
        self._direct_queue = direct_queue
        self._dispatcher = dispatcher
        self._component: GpuServer | None = None
        self._program: _Program | None = None
        self._serving: asyncio.Task[None] | None = None
        self._restarting: asyncio.Task[None] | None = None

    @property
    def origin(self) -> str:
        """Return where it is, once it was started."""
        return f"http://{_HOST}:{self.port}"

    @property
    def url(self) -> str:
        """Return where jobs are POSTed to: what to register as its endpoint."""
        return f"{self.origin}/generate"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._restarting is not None:
            await asyncio.gather(self._restarting, return_exceptions=True)
        await self._end()

    async def start(self) -> None:
        """Listen; after a crash at the same port again. Harmless where it runs."""
        if self._program is not None:
            return
        self._component = GpuServer(
            self._run,
            max_concurrent=self.slots,
            direct_queue=self._direct_queue,
            asynchronous=self.asynchronous,
            dispatcher=self._dispatcher,
        )
        listener = socket.create_server((_HOST, self.port), backlog=1024)
        # asyncio does this only for sockets that it made itself; without it small answers wait for 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port = listener.getsockname()[1]
        self._program = _Program(self._serve)
        self._serving = asyncio.create_task(self._program.serve([listener]))
        await self._program.ready.wait()

    async def crash(self) -> None:
        """Cut every connection, forget every job, and be gone until `start`. What ran has not finished."""
        self.crashes += 1
        await self._end()

    async def crash_and_restart(self) -> None:
        """Crash, and be back at once with no memory of anything."""
        await self.crash()
        await self.start()

    async def _end(self) -> None:
        program, self._program = self._program, None
        component, self._component = self._component, None
        serving, self._serving = self._serving, None
        if program is None or component is None or serving is None:
            return
        program.cut()
        await component.aclose()
        await serving

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
            self.refused += message.get("status") == 503  # noqa: PLR2004 - busy
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
        """Return what the mode answers in place of the component."""
        if scope["path"] == _HEALTH:
            return _HEALTH_ANSWERS.get(self.mode)
        if self.mode in _ANSWERS:
            return _ANSWERS[self.mode]
        if scope["method"] != "POST":
            return None
        if self.mode is Mode.BUSY and (b"x-source", b"dispatcher") in scope["headers"]:
            return 503, b"{}"
        return (200, _LIE) if self.mode is Mode.LIE_DONE else None

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
        """Return what it has seen: ``runs`` by job, ``most_at_once`` and the like, as JSON can express it."""
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


class _Program(uvicorn.Server):
    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
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
        self.ready = asyncio.Event()
        self._cut = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield  # they are the program's that this one is part of

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    async def main_loop(self) -> None:
        await self._cut.wait()  # in place of a look ten times a second

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002 - `cut` has closed them
        for _ in range(_TURNS):
            await asyncio.sleep(0)
            self.cut()
        if tasks := self.server_state.tasks:
            await asyncio.wait(tasks, timeout=_ENDING)

    def cut(self) -> None:
        self.should_exit = True
        self._cut.set()
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()


async def _wait_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _held_back(_: Any) -> None:
    """Send nothing."""

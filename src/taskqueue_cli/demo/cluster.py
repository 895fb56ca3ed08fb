"""A server and its workers, as processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import msgspec

from taskqueue_cli.demo.job import KEY_VARIABLE
from taskqueue_cli.demo.processes import Child, Children
from taskqueue_core.config import Settings, load_settings
from taskqueue_core.errors import ConfigurationError, TaskQueueError
from taskqueue_remote import RemoteBackend

_TARGET = "taskqueue_cli.demo.job:worker"
_START_TIMEOUT = 30.0
_POLL_SECONDS = 0.05
_STABLE_POLLS = 3


class DemoFailed(TaskQueueError):
    """A run could not be finished. ``logs`` is what the process in question said last."""

    code = "demo_failed"

    def __init__(self, message: str, *, logs: str = "", exit_code: int = 1) -> None:
        super().__init__(message)
        self.logs = logs
        self.exit_code = exit_code


class _Error(msgspec.Struct, frozen=True):
    detail: str


class _Ready(msgspec.Struct, frozen=True):
    url: str = ""
    embedded: str = ""
    store: dict[str, str] = {}
    error: _Error | None = None


class Cluster:
    """Starts a server on a free port, and workers for it. Leaving it ends them all."""

    def __init__(
        self,
        key: str,
        name: str,
        *,
        embedded: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Start nothing yet. ``variables`` are the server's alone.

        Raises `ConfigurationError` for a backend that leads to another server.
        """
        if name == "server":
            raise ConfigurationError(
                "the demo starts its own server and cannot use another: set --backend to a store, for example redis"
            )
        self._key = key
        self._backend_name = name
        self._embedded = embedded
        self._children = Children()
        self._env = os.environ | {KEY_VARIABLE: key}
        self._variables = dict(variables or {})
        self.store: Mapping[str, str] = {}
        """environment variables by which the server finds its embedded store, once it was started"""
        self.store_name = ""
        """product and version of the embedded store; empty without one"""
        self._workers: dict[str, Child] = {}
        self._started = 0
        self.url = ""
        self.backend: RemoteBackend

    async def start_server(self) -> Child:
        """Start the server and wait until it listens. Raises `DemoFailed`."""
        args: tuple[str, ...]
        args = (
            "serve",
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--backend",
            self._backend_name,
            "--json",
        )
        if self._embedded:
            args += ("--embedded-redis", str(self._children.folder / "store"))
        env = self._env | self._variables
        server = await self._children.start("server", *args, env=env, piped=True)
        ready = msgspec.json.Decoder(_Ready)
        try:
            async with asyncio.timeout(_START_TIMEOUT):
                decoded = ready.decode(await server.first_line())
        except (TimeoutError, msgspec.MsgspecError):
            raise self._failure("the server did not start", server) from None
        if decoded.error is not None:
            code = await server.wait()
            raise DemoFailed(f"the server did not start: {decoded.error.detail}", exit_code=code)
        self.url, self.store, self.store_name = decoded.url, decoded.store, decoded.embedded
        token = load_settings(Settings).token
        self.backend = RemoteBackend(self.url, token.get_secret_value() if token else None)
        return server

    async def start_worker(self) -> Child:
        """Start one more worker and wait until it is connected. Raises `DemoFailed`."""
        self._started += 1
        name = f"worker-{self._started}"
        args = ("worker", _TARGET, "--url", self.url, "--worker-id", f"{self._key}.{name}")
        child = await self._children.start(name, *args, env=self._env)
        try:
            async with asyncio.timeout(_START_TIMEOUT):
                while name not in await self.held():
                    self.check()
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            raise self._failure(f"{name} did not connect", child) from None
        self._workers[name] = child
        return child

    async def held(self) -> dict[str, int]:
        """Return how many deliveries each connected worker of this run holds, as the server sees it."""
        prefix = f"{self._key}."
        return {
            worker.worker_id.removeprefix(prefix): worker.in_flight
            for worker in await self.backend.control.workers()
            if worker.worker_id.startswith(prefix)
        }

    def pause_workers(self) -> None:
        """Hold every worker still."""
        for child in self._workers.values():
            child.signal(signal.SIGSTOP)

    async def kill_busiest_worker(self) -> tuple[Child, int]:
        """Kill the frozen worker that holds most, and let the others go on. Raises `DemoFailed`.

        What a frozen worker holds is certain: nothing that it settled before is under way any more.
        """
        try:
            async with asyncio.timeout(_START_TIMEOUT):
                held = await self._wait_until_stable()
        except TimeoutError:
            raise DemoFailed(
                "no worker received a delivery in time, so none could be killed while holding one"
            ) from None
        name = max(held, key=lambda name: held[name])
        victim = self._workers.pop(name)
        await victim.kill()
        for child in self._workers.values():
            child.signal(signal.SIGCONT)
        return victim, held[name]

    async def _wait_until_stable(self) -> dict[str, int]:
        last: dict[str, int] = {}
        times = 0
        while times < _STABLE_POLLS:
            await asyncio.sleep(_POLL_SECONDS)
            self.check()
            held = {name: n for name, n in (await self.held()).items() if name in self._workers}
            times = times + 1 if held == last and any(held.values()) else 0
            last = held
        return last

    def check(self) -> None:
        """Raise `DemoFailed` if a process ended by itself."""
        ended = self._children.ended()
        if ended is not None:
            raise self._failure(f"{ended.name} ended unexpectedly", ended)

    async def run_until_cancelled(self) -> None:
        """Leave everything running until cancelled. Raises `DemoFailed` if a process ends."""
        while True:
            self.check()
            await asyncio.sleep(1)

    def _failure(self, message: str, child: Child) -> DemoFailed:
        return DemoFailed(message, logs=child.tail())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self.url:
                await self.backend.aclose()
            for child in self._workers.values():
                child.signal(signal.SIGCONT)
            await self._children.stop()
        finally:
            await self._children.end()

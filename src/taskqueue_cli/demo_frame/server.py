"""The server and the workers of a demo, each in a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import msgspec

from taskqueue_cli.demo_frame.processes import Child, Children
from taskqueue_cli.demo_frame.run import DemoFailed
from taskqueue_core.config import Settings, load_settings
from taskqueue_core.errors import ConfigurationError
from taskqueue_remote import RemoteBackend

_START_TIMEOUT = 30.0
_POLL_SECONDS = 0.05
_STABLE_POLLS = 3


class _Error(msgspec.Struct, frozen=True):
    detail: str


class _Ready(msgspec.Struct, frozen=True):
    url: str = ""
    embedded: str = ""
    store: dict[str, str] = {}
    error: _Error | None = None


class Cluster:
    """A server on a free port, and workers that are connected to it. Exiting the context ends all these processes."""

    def __init__(
        self,
        run_id: str,
        backend_name: str,
        target: str,
        *,
        embedded: bool = False,
        variables: Mapping[str, str],
        server_variables: Mapping[str, str],
    ) -> None:
        """Prepare the environment of the processes, without starting any.

        Workers run ``target`` (``module:attr``), and their ids begin with ``run_id``. ``variables`` are environment
        variables of all processes; ``server_variables`` are added for the server.

        Raises `ConfigurationError` for the backend named ``server``, which would use another server.
        """
        if backend_name == "server":
            raise ConfigurationError(
                "the demo starts its own server and cannot use another: set --backend to a store, for example redis"
            )
        self._run_id = run_id
        self._target = target
        self._serve = ["serve", "--host", "127.0.0.1", "--port", "0", "--backend", backend_name]
        self._children = Children()
        if embedded:
            self._serve += ["--embedded-redis", str(self._children.folder / "store")]
        self._env = {**os.environ, **variables}
        self._server_env = {**self._env, **server_variables}
        self._workers: dict[str, Child] = {}
        self._started = 0
        self.store: Mapping[str, str] = {}
        """environment variables that tell a backend where the embedded store is; empty before the server runs"""
        self.store_name = ""
        """product and version of the embedded store; empty if the server uses another store"""
        self.url = ""
        self.backend: RemoteBackend

    async def start_server(self) -> Child:
        """Start the server and wait until it listens. Raises `DemoFailed`."""
        server = await self._children.start(
            "server", *self._serve, "--json", env=self._server_env, piped=True
        )
        try:
            async with asyncio.timeout(_START_TIMEOUT):
                ready = msgspec.json.decode(await server.first_line(), type=_Ready)
        except (TimeoutError, msgspec.MsgspecError):
            raise DemoFailed("the server did not start", logs=server.tail()) from None
        if ready.error is not None:
            code = await server.wait()
            raise DemoFailed(f"the server did not start: {ready.error.detail}", exit_code=code)
        self.url, self.store, self.store_name = ready.url, ready.store, ready.embedded
        token = load_settings(Settings).token
        self.backend = RemoteBackend(self.url, token.get_secret_value() if token else None)
        return server

    async def start_worker(self) -> Child:
        """Start one more worker and wait until it is connected. Raises `DemoFailed`."""
        self._started += 1
        name = f"worker-{self._started}"
        worker_id = f"{self._run_id}.{name}"
        args = ("worker", self._target, "--url", self.url, "--worker-id", worker_id)
        child = await self._children.start(name, *args, env=self._env)
        try:
            async with asyncio.timeout(_START_TIMEOUT):
                while name not in await self.in_flight():
                    self.check()
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            raise DemoFailed(f"{name} did not connect", logs=child.tail()) from None
        self._workers[name] = child
        return child

    async def in_flight(self) -> dict[str, int]:
        """Return the number of deliveries in flight at each connected worker, as reported by the server."""
        prefix = f"{self._run_id}."
        return {
            worker.worker_id.removeprefix(prefix): worker.in_flight
            for worker in await self.backend.control.workers()
            if worker.worker_id.startswith(prefix)
        }

    def pause_workers(self) -> None:
        """Suspend every worker process with SIGSTOP."""
        for child in self._workers.values():
            child.signal(signal.SIGSTOP)

    async def kill_busiest_worker(self) -> tuple[Child, int]:
        """Kill the paused worker that has the most deliveries in flight, and let the other workers continue.

        Return the worker and that number of deliveries. The number is exact, because a paused worker cannot send acks.
        Raises `DemoFailed`.
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
            held = {
                name: n for name, n in (await self.in_flight()).items() if name in self._workers
            }
            times = times + 1 if held == last and any(held.values()) else 0
            last = held
        return last

    def check(self) -> None:
        """Raise `DemoFailed` if a process ended although it was not stopped."""
        ended = self._children.ended()
        if ended is not None:
            raise DemoFailed(f"{ended.name} ended unexpectedly", logs=ended.tail())

    async def run_until_cancelled(self) -> None:
        """Wait until this call is cancelled. Raises `DemoFailed` if a process ends before that."""
        while True:
            self.check()
            await asyncio.sleep(1)

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

"""The server and the workers of a demo, each in a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from taskqueue_cli.demo_frame.processes import Child
from taskqueue_cli.demo_frame.run import DemoFailed
from taskqueue_core.errors import ConfigurationError
from taskqueue_remote import create_backend

_START_TIMEOUT = 30.0
_POLL_SECONDS = 0.05
_STABLE_POLLS = 3


class ServerReady(msgspec.Struct, frozen=True):
    """The line that ``taskqueue serve --json`` prints when the server listens, or when it cannot start."""

    url: str = ""
    embedded: str = ""
    """product and version of the embedded store; empty if the server uses another store"""
    store: dict[str, str] = {}
    """environment variables that tell a backend where the embedded store is"""
    error: dict[str, Any] = {}


class Cluster(AsyncExitStack):
    """A server on a free port, and workers that are connected to it. Exiting the context ends these processes."""

    def __init__(
        self,
        run_id: str,
        backend: str,
        target: str,
        *,
        embedded: bool = False,
        variables: Mapping[str, str],
        server_variables: Mapping[str, str],
    ) -> None:
        """Create a cluster without starting any process.

        Workers run ``target`` (``module:attr``), and their ids begin with ``run_id``. ``variables`` are environment
        variables of all processes; ``server_variables`` are added for the server.

        Raises `ConfigurationError` for the backend named ``server``, which would use another server.
        """
        super().__init__()
        if backend == "server":
            raise ConfigurationError(
                "the demo starts its own server, so it cannot use another one: set --backend to a store such as redis"
            )
        self._run_id = run_id
        self._target = target
        files = tempfile.TemporaryDirectory(prefix="taskqueue-demo-", ignore_cleanup_errors=True)
        self._folder = Path(self.enter_context(files))
        self._serve = ["serve", "--json", "--host=127.0.0.1", "--port=0", f"--backend={backend}"]
        if embedded:
            self._serve += ["--embedded-redis", str(self._folder / "store")]
        self._env = {**os.environ, **variables}
        self._server_env = {**self._env, **server_variables}
        self._children: list[Child] = []
        self._numbers = count(1)
        self._workers: dict[str, Child] = {}
        self.push_async_callback(self._kill)
        self.push_async_callback(self._stop)

    async def start_server(self) -> Child:
        """Start the server and wait until it listens. Raises `DemoFailed`."""
        env = self._server_env
        server = await Child.start(self._folder, "server", *self._serve, env=env, piped=True)
        self._children.append(server)
        try:
            async with asyncio.timeout(_START_TIMEOUT):
                self.ready = msgspec.json.decode(await server.first_line(), type=ServerReady)
        except (TimeoutError, msgspec.MsgspecError):
            raise DemoFailed("the server did not start", logs=server.tail()) from None
        if error := self.ready.error:
            code = await server.process.wait()
            raise DemoFailed(f"the server did not start: {error['detail']}", exit_code=code)
        self.backend = create_backend(self.ready.url)
        self.push_async_callback(self.backend.aclose)
        return server

    async def start_worker(self) -> Child:
        """Start one more worker and wait until it is connected. Raises `DemoFailed`."""
        name = f"worker-{next(self._numbers)}"
        command = ("worker", self._target, "--url", self.ready.url, "--worker-id")
        worker_id = f"{self._run_id}.{name}"
        child = await Child.start(self._folder, name, *command, worker_id, env=self._env)
        self._children.append(child)
        try:
            async with asyncio.timeout(_START_TIMEOUT):
                while name not in await self._in_flight():
                    self.check()
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            raise DemoFailed(f"{name} did not connect", logs=child.tail()) from None
        self._workers[name] = child
        return child

    async def _in_flight(self) -> dict[str, int]:
        """Return the number of deliveries in flight at each connected worker, as reported by the server."""
        prefix = f"{self._run_id}."
        return {
            worker.worker_id.removeprefix(prefix): worker.in_flight
            for worker in await self.backend.control.workers()
            if worker.worker_id.startswith(prefix)
        }

    def signal_workers(self, number: signal.Signals) -> None:
        """Send a signal to every worker process, for example SIGSTOP to pause the workers."""
        for child in self._workers.values():
            child.signal(number)

    async def kill_busiest_worker(self) -> tuple[Child, int]:
        """Kill the paused worker that has the most deliveries in flight, and let the other workers continue.

        Return the worker and its number of deliveries, which is exact, because a paused worker cannot send acks.
        Raises `DemoFailed`.
        """
        held: dict[str, int] = {}
        polls = 0
        try:
            async with asyncio.timeout(_START_TIMEOUT):
                while polls < _STABLE_POLLS or not any(held.values()):
                    await asyncio.sleep(_POLL_SECONDS)
                    self.check()
                    now = await self._in_flight()
                    last, held = held, {name: now[name] for name in self._workers if name in now}
                    polls = polls + 1 if held == last else 0
        except TimeoutError:
            raise DemoFailed("no worker received a delivery in time, so none was killed") from None
        name = max(held, key=lambda name: held[name])
        victim = self._workers.pop(name)
        await victim.stop(signal.SIGKILL)
        self.signal_workers(signal.SIGCONT)
        return victim, held[name]

    def check(self) -> None:
        """Raise `DemoFailed` if a process ended although it was not stopped."""
        for child in self._children:
            if child.failed:
                raise DemoFailed(f"{child.name} ended unexpectedly", logs=child.tail())

    async def _stop(self) -> None:
        self.signal_workers(signal.SIGCONT)  # a paused process would not react to SIGTERM
        await asyncio.gather(*(child.stop() for child in self._children[1:]))
        await asyncio.gather(*(child.stop() for child in self._children[:1]))

    async def _kill(self) -> None:
        for child in self._children:
            child.signal(signal.SIGKILL)  # a second Ctrl-C may have left processes running
        await asyncio.gather(*(child.process.wait() for child in self._children))

"""Simulated Prefect workers that send and receive frames, and task runs in Prefect's format."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any, Self
from uuid import uuid4

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from taskqueue_core.tasks import State, TaskStatus
from taskqueue_redis import RedisBackend
from tests.server.support import SECONDS, Running, eventually

KEY = "add-1a2b3c4d"
PATH = "/api/task_runs/subscriptions/scheduled"
DEADLY = {1000, 1001}
"""close codes after which a Prefect worker's process ends"""


def task_run(key: str = KEY, **changes: Any) -> dict[str, Any]:
    """Return a minimal task run that a worker accepts, with changes; the value ``...`` removes a field."""
    run: dict[str, Any] = {
        "id": str(uuid4()),
        "task_key": key,
        "dynamic_key": f"{key}-{uuid4().hex}",
        "name": "add",
        "state": {
            "type": "SCHEDULED",
            "state_details": {"deferred": True, "task_parameters_id": str(uuid4())},
        },
    }
    return {name: value for name, value in (run | changes).items() if value is not ...}


async def publish_runs(it: Running, *ids: str, key: str = KEY, **fields: Any) -> None:
    """Publish task runs with these names, which are also the ids of their tasks."""
    for name in ids:
        payload = json.dumps(task_run(key, name=name)).encode()
        await it.publish(name, key=key, payload=payload, **fields)


def url_of(it: Running, path: str = PATH) -> str:
    """Return the URL of a WebSocket path."""
    return it.server.url.replace("http", "ws") + path


async def status(it: Running, name: str = "a") -> TaskStatus:
    """Return the status of a task in the store."""
    (found,) = await it.backend.control.statuses(KEY, name)  # type: ignore[attr-defined]
    assert found is not None
    return found  # type: ignore[no-any-return]


async def untouched(it: Running, name: str = "a") -> None:
    """Check that a task was returned without counting an attempt or a loss (law 3)."""
    await it.reaches(KEY, in_flight=0)
    found = await status(it, name)
    assert (found.state, found.attempt, found.losses) == (State.WAITING, 1, 0)


async def done(backend: RedisBackend, name: str, count: int) -> None:
    """Wait until ``count`` runs of a task are done, because an ack is settled only some time after it was sent."""

    async def there() -> bool:
        return (await backend.control.ledger(name)).done == count

    await eventually(there)


class Taker:
    """A simulated worker that subscribes when entered, and acks when the test says so."""

    def __init__(
        self,
        url: str,
        *keys: str,
        client_id: str = "host-1",
        token: str | None = None,
        headers: dict[str, str] | None = None,
        quiet: bool = False,
    ) -> None:
        """Create the worker; with ``quiet`` it connects without sending anything."""
        self._url = url
        self._keys = keys or (KEY,)
        self._client_id = client_id
        self._token = token
        self._headers = headers
        self._quiet = quiet
        self.socket: ClientConnection

    async def __aenter__(self) -> Self:
        self.socket = await connect(
            self._url,
            subprotocols=[Subprotocol("prefect")],
            additional_headers=self._headers,
            proxy=None,
            ping_interval=None,
            close_timeout=1,
        )
        try:
            assert self.socket.subprotocol == "prefect"
            if not self._quiet:
                await self.authenticate()
                await self.send("subscribe", keys=self._keys, client_id=self._client_id)
        except BaseException:  # close the socket here, because ``__aexit__`` is not called
            self.socket.transport.abort()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.socket.transport.abort()

    async def authenticate(self) -> None:
        """Send the token, and expect to be accepted."""
        await self.send("auth", token=self._token)
        assert json.loads(await self.socket.recv()) == {"type": "auth_success"}

    async def send(self, kind: str, **fields: Any) -> None:
        """Send a frame."""
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def receive(self, seconds: float = SECONDS) -> dict[str, Any]:
        """Return the next task run."""
        async with asyncio.timeout(seconds):
            found: dict[str, Any] = json.loads(await self.socket.recv())
            return found

    async def ack(self) -> None:
        """Acknowledge the last task run."""
        await self.send("ack")

    async def take(self, count: int) -> list[str]:
        """Receive and acknowledge ``count`` task runs, and return their names."""
        names = []
        for _ in range(count):
            names.append((await self.receive())["name"])
            await self.ack()
        return names

    async def nothing_comes(self, seconds: float = 0.1) -> None:
        """Check that no frame arrives for a while, and that the connection stays open."""
        try:
            async with asyncio.timeout(seconds):
                text = await self.socket.recv()
        except TimeoutError:
            return
        raise AssertionError(f"unexpected frame: {text!r:.200}")

    async def closed(self, seconds: float = SECONDS) -> tuple[int, str]:
        """Return the close code and reason once the server has closed; the code must not be one that ends a worker."""
        async with asyncio.timeout(seconds):
            with contextlib.suppress(ConnectionClosed):
                while True:
                    await self.socket.recv()
        code, reason = self.socket.close_code, self.socket.close_reason
        assert code is not None
        assert code not in DEADLY
        return code, reason or ""

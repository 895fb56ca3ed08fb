"""Workers of Prefect by hand: their frames, and task runs as they come from Prefect."""

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
"""after these close codes a worker's process ends"""


def task_run(key: str = KEY, **changes: Any) -> dict[str, Any]:
    """The least that a worker takes, with changes; ``...`` as a value takes a field away."""
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
    """Publish task runs with these ids, to the queue and in the run."""
    for name in ids:
        payload = json.dumps(task_run(key, name=name)).encode()
        await it.publish(name, key=key, payload=payload, **fields)


def url_of(it: Running, path: str = PATH) -> str:
    """Return the address of a socket."""
    return it.server.url.replace("http", "ws") + path


async def status(it: Running, name: str = "a") -> TaskStatus:
    """What the store knows of a task."""
    (found,) = await it.backend.control.statuses(KEY, name)  # type: ignore[attr-defined]
    assert found is not None
    return found  # type: ignore[no-any-return]


async def untouched(it: Running, name: str = "a") -> None:
    """Check that a task went back as if nothing had been: no attempt and no loss is counted (law 3)."""
    await it.reaches(KEY, in_flight=0)
    found = await status(it, name)
    assert (found.state, found.attempt, found.losses) == (State.WAITING, 1, 0)


async def done(backend: RedisBackend, name: str, count: int) -> None:
    """Wait until so many runs of a task are done: an ack is not known to be settled when it is sent."""

    async def there() -> bool:
        return (await backend.control.ledger(name)).done == count

    await eventually(there)


class Taker:
    """A worker that subscribes when it is entered, and acks when it is told to."""

    def __init__(
        self,
        url: str,
        *keys: str,
        client_id: str = "host-1",
        token: str | None = None,
        headers: dict[str, str] | None = None,
        quiet: bool = False,
    ) -> None:
        """``quiet``: it connects, and says nothing of itself."""
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
        except BaseException:  # it is never entered: nobody else closes it
            self.socket.transport.abort()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.socket.transport.abort()

    async def authenticate(self) -> None:
        """Show the token, and be let in."""
        await self.send("auth", token=self._token)
        assert json.loads(await self.socket.recv()) == {"type": "auth_success"}

    async def send(self, kind: str, **fields: Any) -> None:
        """Send a frame."""
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def receive(self, seconds: float = SECONDS) -> dict[str, Any]:
        """The next task run."""
        async with asyncio.timeout(seconds):
            found: dict[str, Any] = json.loads(await self.socket.recv())
            return found

    async def ack(self) -> None:
        """Acknowledge what came last."""
        await self.send("ack")

    async def take(self, count: int) -> list[str]:
        """Receive and acknowledge so many; return their names."""
        names = []
        for _ in range(count):
            names.append((await self.receive())["name"])
            await self.ack()
        return names

    async def nothing_comes(self, seconds: float = 0.1) -> None:
        """Check that nothing comes for a while, and that the connection stands."""
        try:
            async with asyncio.timeout(seconds):
                text = await self.socket.recv()
        except TimeoutError:
            return
        raise AssertionError(f"this came: {text!r:.200}")

    async def closed(self, seconds: float = SECONDS) -> tuple[int, str]:
        """The close code and its reason, once the server has closed. It must not be one that ends a worker."""
        async with asyncio.timeout(seconds):
            with contextlib.suppress(ConnectionClosed):
                while True:
                    await self.socket.recv()
        code, reason = self.socket.close_code, self.socket.close_reason
        assert code is not None
        assert code not in DEADLY
        return code, reason or ""

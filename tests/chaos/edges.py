"""Chaos runs at the edges: the largest tasks and receives, a changed password, a wrong clock, and damaged records."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tests.chaos.world import CONFIG, Shape, World
from tests.redis.clocks import WallClock
from tests.redis.engines import find_engine
from tests.redis.resp import RedisError
from tests.redis.servers import RedisServer

_DAMAGE = """
for _ = 1, 20 do
  local id = redis.call('HRANDFIELD', KEYS[1])
  local record = id and redis.call('HGET', KEYS[1], id)
  if record and #record >= 49 and string.byte(record) <= 2 and string.byte(record, 3) == 5 then
    redis.call('HSET', KEYS[1], id, string.sub(record, 1, 20))
    return id
  end
end
"""
"""a script that cuts the record of some live task with the usual priority, and returns the task's id"""
_LARGE: Mapping[str, Any] = {
    "tasks": 2000,
    "limit": 1000,
    "take": 1000,
    "large": 0.01,
    "lease": 4.0,
}
"""changes to the shape of such a run; faults that follow each other may keep heartbeats away for longer than usual"""


class Edges(World):
    """A run whose Redis requires a password from a file, and whose tasks and receives are of the largest sizes."""

    def __init__(self, folder: Path, shape: Shape | None = None, **more: Any) -> None:
        """Prepare the run without starting anything."""
        self._passwords = 0
        self._file = folder / "password"
        folder.mkdir(parents=True, exist_ok=True)
        config = {**CONFIG, "requirepass": self._next_password()}
        redis = RedisServer(find_engine(), folder / "redis", config=config)
        self.clock = WallClock(folder)
        redis.environment = self.clock.environment
        super().__init__(
            folder,
            msgspec.structs.replace(shape or Shape(), **_LARGE),
            redis=redis,
            env={"TASKQUEUE_REDIS_PASSWORD_FILE": str(self._file)},
            **more,
        )
        self.credentials = {"password_file": self._file}
        self._use(config["requirepass"])

    def _next_password(self) -> str:
        self._passwords += 1
        return f"password-{self._passwords}"

    def _use(self, password: str) -> None:
        """Let this process use a password, and write it into the file that the other processes read."""
        self.redis.login = "default", password
        self._file.write_text(password)

    async def rotate(self, late: float) -> None:
        """Change the password, and close all connections. The file gets the new password ``late`` seconds later."""
        password = self._next_password()
        with contextlib.suppress(OSError, RedisError):  # Redis may be down
            await asyncio.to_thread(self.redis.call, "CONFIG", "SET", "requirepass", password)
            self.redis.config["requirepass"] = password
            self.redis.login = "default", password
            await asyncio.to_thread(self.redis.call, "CLIENT", "KILL", "TYPE", "normal")
        await asyncio.sleep(late)
        self._use(self.redis.config["requirepass"])

    async def damage(self, key: str) -> None:
        """Cut the record of a live task of a queue."""
        with contextlib.suppress(OSError, RedisError):
            records = f"{{chaos:0}}:q:{key}/t"
            await asyncio.to_thread(self.redis.call, "EVAL", _DAMAGE, 1, records)

"""Rewriting the append-only file after each start of Redis, so that no script is replayed in part.

The writes of a script are one transaction in that file. A kill or a power cut can leave the last transaction
incomplete. Redis then drops the truncated write, but keeps the writes before it. They have no effect at first, but at
the next start Redis executes them together with the transaction that follows, so the script has been executed in part.
Redis 6.2 and 7.0 and Valkey 8.1.8 are affected, but not Valkey 9.1.2: https://github.com/valkey-io/valkey/pull/4342.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import NamedTuple

from taskqueue_redis.connection.background import BackgroundTasks
from taskqueue_redis.connection.client import Ask, RedisClient
from taskqueue_redis.connection.failures import Failure, Misconfigured, ScriptError

_RETRY_SECONDS, _MAX_RETRY_SECONDS = 2.0, 60.0
"""first and longest pause in seconds before the masters are checked again"""
_NO = "0"
_SEVERAL_FILES = 7
"""first major version of Redis whose append-only log consists of several files"""
_log = logging.getLogger("taskqueue.redis")


class AofReading(NamedTuple):
    """Result of a check of the append-only files."""

    whole: bool
    """whether no further check is needed"""
    obstacle: str = ""
    """reason why a file cannot be rewritten; empty if there is none"""


class AofRewriter:
    """Makes servers rewrite their append-only files, in the background, whenever a server may have been restarted."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self._tasks = BackgroundTasks()
        self._running = False
        self._due = False
        self._obstacle = ""
        self._closed = False
        client.when_reopened(self.start)

    def start(self) -> None:
        """In the background, make servers rewrite their append-only files; check again until none must be rewritten."""
        self._due = True
        if not self._closed and not self._running:
            self._running = True
            self._tasks.start(self._run())

    async def try_once(self) -> bool:
        """Make each master rewrite its file if necessary. Return whether no further check is needed."""
        try:
            reading = await rewrite_logs(self._client)
        except Failure:
            return False
        if reading.obstacle and reading.obstacle != self._obstacle:
            self._obstacle = reading.obstacle
            _log.warning(
                "%s: the append-only file cannot be rewritten (%s): run BGREWRITEAOF yourself "
                    "whenever Redis was killed or lost power",
                self._client.settings.address.shown, reading.obstacle,
            )  # fmt: skip
        elif reading.whole and not reading.obstacle:
            self._obstacle = ""
        return reading.whole

    async def aclose(self) -> None:
        self._closed = True
        await self._tasks.aclose()

    async def _run(self) -> None:
        pause = _RETRY_SECONDS
        try:
            while self._due and not self._closed:
                self._due = False
                whole = await self.try_once()
                # Pause even if `start` was called in the meantime, because it may be called very often.
                await asyncio.sleep(pause)
                if whole:
                    pause = _RETRY_SECONDS
                else:
                    self._due, pause = True, min(2 * pause, _MAX_RETRY_SECONDS)
        finally:
            self._running = False


def parse_info(info: bytes) -> dict[str, str]:
    """Return the fields of an answer to INFO."""
    lines = info.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))


async def rewrite_logs(client: RedisClient) -> AofReading:
    """Make each master rewrite its append-only file, unless it has none or the file is certainly whole.

    A file is whole if it was empty when the server started, or was rewritten since. Raises `Failure` if no masters are
    known.
    """
    looks = await client.at_each_master(_read_persistence)
    obstacles = (reading.obstacle for reading in looks if reading.obstacle)
    return AofReading(all(reading.whole for reading in looks), next(obstacles, ""))


async def _read_persistence(ask: Ask) -> AofReading:
    try:
        facts = parse_info(await ask(("INFO",)))
        if facts.get("loading", _NO) != _NO:
            return AofReading(whole=False)
        if _is_whole(facts):
            return AofReading(whole=True)
        if facts.get("aof_rewrite_in_progress") != _NO or facts.get("aof_rewrite_scheduled") != _NO:
            return AofReading(whole=False)
        return await _rewrite(ask, failed=facts.get("aof_last_bgrewrite_status") != "ok")
    except Failure:
        return AofReading(whole=False)  # the server is unavailable


async def _rewrite(ask: Ask, *, failed: bool) -> AofReading:
    try:
        await ask(("BGREWRITEAOF",))
    except Misconfigured as failure:
        return AofReading(
            whole=True, obstacle=str(failure)
        )  # a missing permission is permanent, so do not retry
    except ScriptError as error:  # another process may have requested a rewrite at the same moment
        failed = "in progress" not in error.text
    return AofReading(
        whole=False, obstacle="BGREWRITEAOF failed; see the log of Redis" if failed else ""
    )


def _is_whole(facts: Mapping[str, str]) -> bool:
    if facts.get("aof_enabled") != "1":
        return True
    major = int(facts.get("redis_version", _NO).partition(".")[0])
    # Redis 7.0 and later have several files; "aof_base_size" is the size of only the first file, which may be empty.
    began_with = facts.get("aof_base_size" if major < _SEVERAL_FILES else "aof_current_size")
    if began_with == _NO:
        return True
    written = facts.get("aof_last_rewrite_time_sec") != "-1"
    fine = facts.get("aof_last_bgrewrite_status") == "ok"
    return written and fine and facts.get("aof_rewrite_in_progress") == _NO

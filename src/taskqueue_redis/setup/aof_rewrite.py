"""After a start, each Redis rewrites its append-only file, so that half a script never comes back from it.

A script's writes are one transaction in that file. A kill or a power cut can leave the last transaction without
its end. Redis then drops the write that is cut in two, but not those before it. They do nothing at first; but the
next start runs them together with the transaction after them, and half a script has been executed. Redis 6.2 and
7.0 and Valkey 8.1.8 do so; Valkey 9.1.2 does not: https://github.com/valkey-io/valkey/pull/4342.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from taskqueue_redis.connection.client import Ask, Link
from taskqueue_redis.connection.failures import Failure, Misconfigured, ScriptError
from taskqueue_redis.setup.checks import parsed

_NO = "0"
_SEVERAL_FILES = 7
"""the version since which the log is in several of them"""


class AofReading(NamedTuple):
    """What was found."""

    whole: bool
    """whether there is nothing to look for again after a while"""
    obstacle: str = ""
    """why a file is not rewritten"""


async def rewrite_logs(link: Link) -> AofReading:
    """Have each master rewrite its file in the background, unless it has done so since its start.

    Raises a `Failure` where it is not known who they are.
    """
    looks = await link.at_each_master(_read_persistence)
    obstacles = (reading.obstacle for reading in looks if reading.obstacle)
    return AofReading(all(reading.whole for reading in looks), next(obstacles, ""))


async def _read_persistence(ask: Ask) -> AofReading:
    try:
        facts = parsed(await ask(("INFO",)))
        if facts.get("loading", _NO) != _NO:
            return AofReading(whole=False)
        if _is_whole(facts):
            return AofReading(whole=True)
        if facts.get("aof_rewrite_in_progress") != _NO or facts.get("aof_rewrite_scheduled") != _NO:
            return AofReading(whole=False)
        return await _rewrite(ask, failed=facts.get("aof_last_bgrewrite_status") != "ok")
    except Failure:
        return AofReading(whole=False)  # it is out of reach


async def _rewrite(ask: Ask, *, failed: bool) -> AofReading:
    try:
        await ask(("BGREWRITEAOF",))
    except Misconfigured as failure:
        return AofReading(whole=True, obstacle=str(failure))  # nothing that time would change
    except ScriptError as error:  # another process may have asked in the same moment
        failed = "in progress" not in error.text
    return AofReading(
        whole=False, obstacle="Redis cannot, and its own log says why" if failed else ""
    )


def _is_whole(facts: Mapping[str, str]) -> bool:
    if facts.get("aof_enabled") != "1":
        return True
    major = int(facts.get("redis_version", _NO).partition(".")[0])
    # Since 7.0 there are several files, and this is the size of the first, which may be empty.
    began_with = facts.get("aof_base_size" if major < _SEVERAL_FILES else "aof_current_size")
    if began_with == _NO:
        return True
    written = facts.get("aof_last_rewrite_time_sec") != "-1"
    fine = facts.get("aof_last_bgrewrite_status") == "ok"
    return written and fine and facts.get("aof_rewrite_in_progress") == _NO

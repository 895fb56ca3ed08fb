"""A Redis that was started on an append-only file writes it anew: what a crash tore at its end must not come back.

A script's writes stand in that file as one transaction. A kill or a power cut can leave the last one without
its end, and Redis drops only the write that is torn, not those before it. At first they do nothing; but the next
start runs them with the transaction that follows them, and half a script has been executed after all. Seen with
6.2 and 7.0; https://github.com/valkey-io/valkey/pull/4342 describes it.
"""

from __future__ import annotations

import contextlib

from taskqueue_redis.checks import parsed
from taskqueue_redis.failures import ScriptError
from taskqueue_redis.link import Link

__all__ = ["rewrite_logs"]


async def rewrite_logs(link: Link) -> None:
    """Have each master that has not done so since its start write its file anew, in the background.

    Raises a `Failure`: `Misconfigured` where this user may not ask for it.
    """
    with contextlib.suppress(ScriptError):  # another process has asked for it in the same moment
        await link.wherever(_is_due, ("INFO", "persistence"), "BGREWRITEAOF")


def _is_due(info: bytes) -> bool:
    facts = parsed(info)
    begun = facts.get("aof_rewrite_in_progress") == "1" or facts.get("aof_rewrite_scheduled") == "1"
    return (
        facts.get("aof_enabled") == "1"
        and facts.get("aof_base_size", "0") != "0"  # else it began with nothing
        and facts.get("aof_last_rewrite_time_sec") == "-1"
        and not begun
    )

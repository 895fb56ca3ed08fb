"""What the processes of a run share: what they are told, how they log, and how they end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from tests.chaos.history import Log, What

__all__ = ["Setup", "main"]

_STDIN = 0


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What a process is told, as JSON in its first argument."""

    name: str
    """of this start: no other has it"""
    log: str
    seed: int = 0
    word: str = "redis"
    """which backend"""
    keys: tuple[str, ...] = ()

    # producers
    number: int = 0
    """which producer this is; starts of the same one share it"""
    before: tuple[str, ...] = ()
    """the logs of its earlier starts"""
    tasks: int = 0
    """how many all of its starts publish together"""
    batch: int = 20
    pace: float = 0.0
    """seconds from one batch to the next"""
    simple: bool = False
    """publish only tasks that are to be acked at once: no delays, deadlines or failures"""

    # consumers
    identity: str = "consumer"
    limit: int = 100
    """deliveries in hand at most"""
    take: int = 25
    """deliveries of one receive at most"""
    hold: float = 0.02
    """seconds that a delivery is worked on, at most"""


def main(run: Callable[[Setup, Log, asyncio.Event], Awaitable[None]]) -> None:
    """Run a program until it ends, SIGTERM sets its event, or its parent has gone. Whatever it raises is noted."""
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    setup = msgspec.json.decode(sys.argv[1].encode(), type=Setup)
    with Log(Path(setup.log), setup.name) as log:
        log.started()
        try:
            asyncio.run(_run(run, setup, log))
        except Exception as error:  # noqa: BLE001 - the checker reports it
            log.note(What.ERROR, note=f"{type(error).__name__}: {error}"[:500])
            traceback.print_exc()
            sys.exit(1)
        log.note(What.ENDED, target=setup.name)


async def _run(
    run: Callable[[Setup, Log, asyncio.Event], Awaitable[None]], setup: Setup, log: Log
) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: _unhandled(log, context))
    over = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, over.set)
    await run(setup, log, over)


def _unhandled(log: Log, context: dict[str, object]) -> None:
    error = context.get("exception")
    log.note(What.ERROR, note=f"unhandled: {context.get('message')}: {error!r}"[:500])


def _end_with_parent() -> None:
    # Nobody writes: the read ends when the parent's end of the pipe is closed, by a SIGKILL too.
    while os.read(_STDIN, 1):
        pass
    os._exit(9)

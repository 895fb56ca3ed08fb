"""What the processes of a run share: what they are told, how they log, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import msgspec

from tests.chaos.history import Log, What

_SET_DEATH_SIGNAL = 1


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What a process is told."""

    role: str

    name: str
    """of this start: no other has it"""
    log: str
    seed: int = 0
    word: str = "redis"
    """which backend"""
    keys: tuple[str, ...] = ()

    number: int = 0
    """which of its role this is; starts of the same one share it"""

    # producers
    before: tuple[str, ...] = ()
    """the logs of its earlier starts"""
    tasks: int = 0
    """how many all of its starts publish together"""
    batch: int = 20
    pace: float = 0.0
    """seconds from one batch to the next"""
    entities: int = 0
    """ordering keys of each queue; half of the tasks have one"""
    keyed: bool = False
    """every task has an ordering key"""
    tenants: int = 0
    """of each queue; each task has one of them, the first one half of all"""
    priorities: tuple[int, ...] = (5, 5, 5, 8)
    hanging: tuple[str, ...] = ()
    """queues of which some tasks are not settled before they are taken back"""
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
    housekeeping: float = 0.0
    """usual seconds between two passes of housekeeping; 0 for none"""

    # crowds
    crowd: int = 0
    """how many workers it is"""


def perform(setup: Setup, env: Mapping[str, str], output: str) -> None:
    """Be the process that a role stands for, until it ends, SIGTERM sets its event, or its parent has gone.

    Whatever it raises is noted, and it exits with 1.
    """
    _die_with_the_nursery()
    os.setsid()  # Ctrl-C is for the test run, which then ends this in order
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(env)
    if os.environ.get("TASKQUEUE_TRACED"):
        importlib.import_module("tests.model.tracing").install()
    program = importlib.import_module(f"tests.chaos.programs.{setup.role}")
    with Log(Path(setup.log), setup.name) as log:
        log.started()
        try:
            asyncio.run(_run(program.run, setup, log))
        except Exception as error:  # noqa: BLE001 - the checker reports it
            log.note(What.ERROR, note=f"{_leaves(error)}"[:500])
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


def _leaves(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_leaves(one) for one in error.exceptions)
    return f"{type(error).__name__}: {error}"


def _unhandled(log: Log, context: dict[str, object]) -> None:
    error = context.get("exception")
    log.note(What.ERROR, note=f"unhandled: {context.get('message')}: {error!r}"[:500])


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(9)


def _die_with_the_nursery() -> None:
    """Have the kernel end this process with its parent, even if it is frozen then; Linux only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)

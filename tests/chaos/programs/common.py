"""What the processes of a chaos run share: their settings, how they log, and how they end."""

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
    """Settings of one process start."""

    role: str

    name: str
    """name of this start; no two starts share one"""
    log: str
    seed: int = 0
    word: str = "redis"
    """name of the backend"""
    keys: tuple[str, ...] = ()

    number: int = 0
    """number of the process within its role; all starts of the process share it"""

    steps: str = ""
    """where steps run that may add steps: thread or process; empty if no step adds steps"""

    # Fields for producers only.
    before: tuple[str, ...] = ()
    """paths of the event logs of earlier starts"""
    tasks: int = 0
    """number of tasks that all starts together publish"""
    batch: int = 20
    pace: float = 0.0
    """seconds between two batches"""
    entities: int = 0
    """number of ordering keys per queue; half of the tasks have one"""
    keyed: bool = False
    """whether every task has an ordering key"""
    tenants: int = 0
    """number of tenants per queue; the first one has half of the tasks"""
    priorities: tuple[int, ...] = (5, 5, 5, 8)
    hanging: tuple[str, ...] = ()
    """queues in which some deliveries are left unsettled until the store revokes them"""
    large: float = 0.0
    """share of the tasks whose payload has nearly the largest size"""
    simple: bool = False
    """whether to publish only tasks that are acked at once, without delays, deadlines or failures"""

    # Fields for consumers only.
    identity: str = "consumer"
    limit: int = 100
    """maximum number of unsettled deliveries"""
    take: int = 25
    """maximum number of deliveries per receive"""
    hold: float = 0.02
    """maximum seconds of work on a delivery"""
    housekeeping: float = 0.0
    """average seconds between two passes of maintenance; 0 for none"""

    # Fields for runs of the dispatcher only.
    port: int = 0
    """port on which the process listens, or to which callbacks go"""
    after: float = 0.0
    """seconds after which a client begins"""
    poisonous: bool = False
    """whether a client submits jobs that fail or exceed their time, with callbacks to hosts that hang"""

    # Fields for servers only.
    pointed: bool = False
    """whether the process has points at which it waits for a fault"""
    polls: bool = False
    """whether it reads the schedules often, because their time comes without a signal"""

    # Field for crowds only.
    crowd: int = 0
    """number of workers that the process simulates"""


def main() -> None:
    """Run the program that `perform` has replaced this process for."""
    text, env, output = sys.argv[1:]
    perform(msgspec.json.decode(text, type=Setup), msgspec.json.decode(env), output)


def perform(setup: Setup, env: Mapping[str, str], output: str) -> None:
    """Run the program of a role until it ends, SIGTERM asks it to end, or its parent process has died.

    An exception is recorded in the log, and the process exits with code 1. A library that is preloaded takes effect
    only in a new program, so the process is replaced by one.
    """
    if "LD_PRELOAD" in env and os.environ.get("LD_PRELOAD") != env["LD_PRELOAD"]:
        words = (msgspec.json.encode(told).decode() for told in (setup, dict(env)))
        command = [sys.executable, "-m", "tests.chaos.programs.common", *words, output]
        os.execve(sys.executable, command, {**os.environ, **env})  # noqa: S606 - the same interpreter
    _die_with_the_nursery()
    os.setsid()  # Ctrl-C reaches only the test run, which then ends this process in order
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
    """Make Linux kill this process when its parent dies, even if this process is frozen."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


if __name__ == "__main__":
    main()

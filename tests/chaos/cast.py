"""The processes of a chaos run: starts, kills, freezes and ends them by process id, and records each step."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.chaos.history import Log, What
from tests.chaos.programs.common import Setup, perform

_PATIENCE = 20.0
# Processes are forked from a server that has imported everything, so that a start takes milliseconds.
_nursery = multiprocessing.get_context("forkserver")
_nursery.set_forkserver_preload(
    [
        "tests.chaos.programs.callback_hosts",
        "tests.chaos.programs.client",
        "tests.chaos.programs.consumer",
        "tests.chaos.programs.crowd",
        "tests.chaos.programs.dispatcher",
        "tests.chaos.programs.gpu",
        "tests.chaos.programs.planner",
        "tests.chaos.programs.producer",
        "tests.chaos.programs.server",
        "tests.chaos.programs.worker",
        "taskqueue_redis",
        "taskqueue_remote",
    ]
)


class Actor:
    """One start of a process."""

    def __init__(self, name: str, role: str, number: int, folder: Path) -> None:
        self.name = name
        self.role = role
        self.number = number
        self.log = folder / f"{name}.jsonl"
        self.output = folder / f"{name}.out"
        self.expected = False
        """whether the run ended this process on purpose, so that its exit is not an error"""
        self.frozen = False
        self.process: BaseProcess

    @property
    def alive(self) -> bool:
        """Whether the process is still running or frozen."""
        return self.process.exitcode is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, unless it has ended."""
        if self.alive and self.process.pid is not None:
            os.kill(self.process.pid, number)

    async def wait(self) -> int:
        """Wait until the process has ended; return its exit code."""
        loop = asyncio.get_running_loop()
        over = asyncio.Event()
        loop.add_reader(self.process.sentinel, over.set)
        try:
            if self.alive:
                await over.wait()
        finally:
            loop.remove_reader(self.process.sentinel)
        self.process.join()
        return self.process.exitcode or 0

    def noted(self, mark: str) -> int:
        """Return how often the given text occurs in the process's event log so far."""
        return self.log.read_bytes().count(mark.encode()) if self.log.exists() else 0

    def tail(self) -> str:
        """Return the last 3000 characters that the process printed."""
        return self.output.read_text("utf-8", "replace")[-3000:] if self.output.exists() else ""


class Cast:
    """All processes of a run. A role and a number identify a process over several starts."""

    def __init__(self, folder: Path, log: Log) -> None:
        """Processes write their event logs to ``folder``; faults that hit them are recorded in ``log``."""
        self.folder = folder
        self.log = log
        self.actors: dict[tuple[str, int], Actor] = {}
        self.all: list[Actor] = []
        self._starts: dict[tuple[str, int], int] = {}
        self.excused: tuple[str, ...] = ()
        """names of errors whose tracebacks a process may print, because a fault causes them"""

    def of(self, role: str) -> list[Actor]:
        """Return the latest start of each process with this role."""
        return [actor for (known, _), actor in self.actors.items() if known == role]

    def logs(self, role: str, number: int) -> tuple[str, ...]:
        """Return the paths of the event logs of all starts of a process."""
        return tuple(str(a.log) for a in self.all if (a.role, a.number) == (role, number))

    def start(
        self, role: str, number: int, env: Mapping[str, str], setup: Mapping[str, Any]
    ) -> Actor:
        """Start the program of `tests.chaos.programs` named like the role, without waiting for it to be active."""
        starts = self._starts[role, number] = self._starts.get((role, number), 0) + 1
        actor = Actor(f"{role}-{number}.{starts}", role, number, self.folder)
        told = Setup(role=role, name=actor.name, log=str(actor.log), number=number, **setup)
        actor.process = _nursery.Process(
            target=perform, args=(told, dict(env), str(actor.output)), name=actor.name
        )
        actor.process.start()
        self.actors[role, number] = actor
        self.all.append(actor)
        return actor

    async def kill(self, actor: Actor) -> None:
        """Kill a process with SIGKILL and wait until it has ended."""
        actor.expected = True
        if actor.alive:
            self.log.note(What.KILLED, target=actor.name, name=actor.role)
        actor.signal(signal.SIGKILL)
        await actor.wait()

    def freeze(self, actor: Actor) -> None:
        """Stop a process with SIGSTOP."""
        if actor.alive and not actor.frozen:
            actor.frozen = True
            self.log.note(What.FROZEN, target=actor.name, name=actor.role)
            actor.signal(signal.SIGSTOP)

    def thaw(self, actor: Actor) -> None:
        """Continue a frozen process with SIGCONT."""
        if actor.frozen:
            actor.frozen = False
            actor.signal(signal.SIGCONT)
            self.log.note(What.THAWED, target=actor.name, name=actor.role)

    async def stop(self, actor: Actor, *, seconds: float = _PATIENCE) -> None:
        """Ask a process to end with SIGTERM. If it does not, record an error and kill it."""
        actor.expected = True
        actor.signal(signal.SIGTERM)
        await self.ended(actor, seconds=seconds)

    async def ended(self, actor: Actor, *, seconds: float = _PATIENCE) -> None:
        """Wait until a process ends by itself; record an error unless its exit code is 0."""
        try:
            async with asyncio.timeout(seconds):
                code = await actor.wait()
        except TimeoutError:
            self.log.note(What.ERROR, note=f"{actor.name} did not end within {seconds:g} s")
            await self.kill(actor)
            return
        if code:
            self.log.note(What.ERROR, note=f"{actor.name} ended with {code}: {actor.tail()}")

    def check(self) -> None:
        """Record an error for each process that has failed without having been killed on purpose."""
        for actor in self.all:
            if not actor.alive and not actor.expected and actor.process.exitcode:
                actor.expected = True
                code = actor.process.exitcode
                self.log.note(What.ERROR, note=f"{actor.name} ended with {code}: {actor.tail()}")

    def inspect(self) -> None:
        """Record an error for each process that printed a traceback."""
        for actor in self.all:
            said = actor.output.read_text("utf-8", "replace") if actor.output.exists() else ""
            traces = said.split("Traceback (most recent call last)")[1:]
            for trace in traces:
                if any(name in trace for name in self.excused):
                    continue
                self.log.note(What.ERROR, note=f"{actor.name} printed: {trace[-1500:]}")

    async def close(self) -> None:
        """Kill all remaining processes and wait until they have ended."""
        for actor in self.all:
            actor.signal(signal.SIGKILL)
        for actor in self.all:
            await actor.wait()
            actor.process.close()

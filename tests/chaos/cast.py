"""The processes of a run: started, killed, frozen and ended, each by its own id, and every step noted."""

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
# Processes are forked from one that has everything loaded: a start takes milliseconds.
_nursery = multiprocessing.get_context("forkserver")
_nursery.set_forkserver_preload(
    [
        "tests.chaos.programs.consumer",
        "tests.chaos.programs.crowd",
        "tests.chaos.programs.producer",
        "tests.chaos.programs.server",
        "tests.chaos.programs.worker",
        "taskqueue_redis",
        "taskqueue_remote",
    ]
)


class Actor:
    """One start of one process."""

    def __init__(self, name: str, role: str, number: int, folder: Path) -> None:
        self.name = name
        self.role = role
        self.number = number
        self.log = folder / f"{name}.jsonl"
        self.output = folder / f"{name}.out"
        self.expected = False
        """whether its end is part of the plan"""
        self.frozen = False
        self.process: BaseProcess

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self.process.exitcode is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.alive and self.process.pid is not None:
            os.kill(self.process.pid, number)

    async def wait(self) -> int:
        """Wait for its end; return its exit code."""
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
        """Return how often its log has this, so far."""
        return self.log.read_bytes().count(mark.encode()) if self.log.exists() else 0

    def tail(self) -> str:
        """Return the end of what it printed."""
        return self.output.read_text("utf-8", "replace")[-3000:] if self.output.exists() else ""


class Cast:
    """Everybody who takes part, under a role and a number that outlive a single start."""

    def __init__(self, folder: Path, log: Log) -> None:
        """Processes log to files in ``folder``; what befalls them goes to ``log``."""
        self.folder = folder
        self.log = log
        self.actors: dict[tuple[str, int], Actor] = {}
        self.all: list[Actor] = []
        self._starts: dict[tuple[str, int], int] = {}

    def of(self, role: str) -> list[Actor]:
        """Return the present actors of a role."""
        return [actor for (known, _), actor in self.actors.items() if known == role]

    def logs(self, role: str, number: int) -> tuple[str, ...]:
        """Return the logs of all starts so far."""
        return tuple(str(a.log) for a in self.all if (a.role, a.number) == (role, number))

    def start(
        self, role: str, number: int, env: Mapping[str, str], setup: Mapping[str, Any]
    ) -> Actor:
        """Start the program of `tests.chaos.programs` that is named as the role; return without waiting for it."""
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
        """End it with SIGKILL, and wait until it is gone."""
        actor.expected = True
        if actor.alive:
            self.log.note(What.KILLED, target=actor.name, name=actor.role)
        actor.signal(signal.SIGKILL)
        await actor.wait()

    def freeze(self, actor: Actor) -> None:
        """Hold it still."""
        if actor.alive and not actor.frozen:
            actor.frozen = True
            self.log.note(What.FROZEN, target=actor.name, name=actor.role)
            actor.signal(signal.SIGSTOP)

    def thaw(self, actor: Actor) -> None:
        """Let it go on."""
        if actor.frozen:
            actor.frozen = False
            actor.signal(signal.SIGCONT)
            self.log.note(What.THAWED, target=actor.name, name=actor.role)

    async def stop(self, actor: Actor, *, seconds: float = _PATIENCE) -> None:
        """Ask it to end; one that does not is an error, and killed."""
        actor.expected = True
        actor.signal(signal.SIGTERM)
        await self.ended(actor, seconds=seconds)

    async def ended(self, actor: Actor, *, seconds: float = _PATIENCE) -> None:
        """Wait for its end by itself, which must be a good one."""
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
        """Note everybody who has ended badly though nobody asked for it."""
        for actor in self.all:
            if not actor.alive and not actor.expected and actor.process.exitcode:
                actor.expected = True
                code = actor.process.exitcode
                self.log.note(What.ERROR, note=f"{actor.name} ended with {code}: {actor.tail()}")

    def inspect(self) -> None:
        """Note every traceback that somebody printed."""
        for actor in self.all:
            said = actor.output.read_text("utf-8", "replace") if actor.output.exists() else ""
            _, mark, trace = said.partition("Traceback (most recent call last)")
            if mark:
                self.log.note(What.ERROR, note=f"{actor.name} printed: {trace[-1500:]}")

    async def close(self) -> None:
        """Kill whoever is left, and wait until all are gone."""
        for actor in self.all:
            actor.signal(signal.SIGKILL)
        for actor in self.all:
            await actor.wait()
            actor.process.close()

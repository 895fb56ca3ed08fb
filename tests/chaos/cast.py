"""The processes of a run: started, killed, frozen and ended, each by its own id, and every step noted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tests.chaos.history import Log, What
from tests.chaos.programs.common import Setup

__all__ = ["Actor", "Cast"]

ROOT = Path(__file__).parents[2]
_PATIENCE = 20.0


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
        self.process: asyncio.subprocess.Process

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self.process.returncode is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            if self.alive:
                self.process.send_signal(number)

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

    async def start(
        self, role: str, number: int, env: Mapping[str, str], *, setup: Mapping[str, Any] | None = None,
        command: tuple[str, ...] = (), piped: bool = False,
    ) -> Actor:  # fmt: skip
        """Start a program of `tests.chaos.programs` named as its role, or a command; return without waiting for it."""
        starts = self._starts[role, number] = self._starts.get((role, number), 0) + 1
        actor = Actor(f"{role}-{number}.{starts}", role, number, self.folder)
        words = command
        if not command:
            told = Setup(name=actor.name, log=str(actor.log), number=number, **(setup or {}))
            words = ("-m", f"tests.chaos.programs.{role}", msgspec.json.encode(told).decode())
        with actor.output.open("wb") as output:
            actor.process = await asyncio.create_subprocess_exec(
                sys.executable,
                *words,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE if piped else output,
                stderr=output,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **env},
                start_new_session=True,
            )
        self.actors[role, number] = actor
        self.all.append(actor)
        return actor

    async def kill(self, actor: Actor) -> None:
        """End it with SIGKILL, and wait until it is gone."""
        actor.expected = True
        if actor.alive:
            self.log.note(What.KILLED, target=actor.name, name=actor.role)
        actor.signal(signal.SIGKILL)
        await actor.process.wait()

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
                await actor.process.wait()
        except TimeoutError:
            self.log.note(What.ERROR, note=f"{actor.name} did not end within {seconds:g} s")
            await self.kill(actor)
            return
        if actor.process.returncode:
            code = actor.process.returncode
            self.log.note(What.ERROR, note=f"{actor.name} ended with {code}: {actor.tail()}")

    def check(self) -> None:
        """Note everybody who has ended badly though nobody asked for it."""
        for actor in self.all:
            if not actor.alive and not actor.expected and actor.process.returncode:
                actor.expected = True
                code = actor.process.returncode
                self.log.note(What.ERROR, note=f"{actor.name} ended with {code}: {actor.tail()}")

    async def close(self) -> None:
        """Kill whoever is left, and wait until all are gone."""
        for actor in self.all:
            actor.signal(signal.SIGKILL)
        for actor in self.all:
            await actor.process.wait()
            if actor.process.stdin is not None:
                actor.process.stdin.close()

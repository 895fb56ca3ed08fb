"""Points in the code of a process at which it waits for a fault, so that the fault comes between two steps.

The run arms a point by a file. The first process that comes to the point takes the file, and waits there until the run
says that the fault has happened, or is itself killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from taskqueue_core.backend import Backend
from taskqueue_core.tasks import Task
from taskqueue_core.workflows import WORKFLOWS, is_part
from tests.chaos.history import Log, What

_LOOK = 0.01
_LONGEST = 3.0
"""maximum seconds for which a process waits at a point"""
_CALLS = ("register", "release", "confirm", "tally", "fire")


class Points:
    """The points of one run, as its processes and the run itself see them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _file(self, point: str, state: str) -> Path:
        return self._folder / f"{point.replace(' ', '-')}.{state}"

    def arm(self, point: str) -> None:
        """Let the next process that comes to a point wait there."""
        for state in ("reached", "over"):
            self._file(point, state).unlink(missing_ok=True)
        self._file(point, "armed").touch()

    def disarm(self, point: str) -> None:
        """Let no other process wait at a point any more."""
        self._file(point, "armed").unlink(missing_ok=True)

    def leave(self, point: str) -> None:
        """Let the process that waits at a point continue."""
        self._file(point, "over").touch()

    def reached_by(self, point: str) -> str:
        """Return the name of the process that waits at an armed point; empty if there is none."""
        file = self._file(point, "reached")
        return file.read_text() if file.exists() else ""

    async def come(self, point: str, log: Log) -> None:
        """Wait at a point if it is armed and no other process came first."""
        taken = self._file(point, log.by)
        try:
            self._file(point, "armed").rename(taken)
        except FileNotFoundError:
            return
        log.note(What.REACHED, name=point)
        taken.write_text(log.by)
        taken.rename(self._file(point, "reached"))
        loop = asyncio.get_running_loop()
        end = loop.time() + _LONGEST
        while loop.time() < end and not self._file(point, "over").exists():  # noqa: ASYNC110 - another process
            await asyncio.sleep(_LOOK)


class Pointed:
    """Passes calls to an object; there are points before and after each call of some methods."""

    def __init__(
        self, inner: Any, points: Points, log: Log, name: Callable[..., str] | None = None
    ) -> None:
        """``name`` returns the name of the points of a call of ``publish``; empty if it has none."""
        self._inner = inner
        self._points = points
        self._log = log
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(self._inner, attribute)
        if attribute not in (_CALLS if self._name is None else ("publish",)):
            return found

        async def call(*args: Any, **options: Any) -> Any:
            name = attribute if self._name is None else self._name(*args)
            if not name:
                return await found(*args, **options)
            await self._points.come(f"before {name}", self._log)
            answer = await found(*args, **options)
            await self._points.come(f"after {name}", self._log)
            return answer

        return call


def _published(*tasks: Task) -> str:
    if tasks and tasks[-1].key == WORKFLOWS:
        return "parts" if is_part(tasks[-1].payload) else "manifest"
    return "steps" if tasks and tasks[-1].after else ""


class PointedBackend:
    """A backend with points before and after the calls that publish workflows, carry lines and fire schedules."""

    def __init__(self, inner: Backend, points: Points, log: Log) -> None:
        self._inner = inner
        whole: Any = inner
        self.publisher: Any = Pointed(whole.publisher, points, log, _published)
        self.dependencies = Pointed(whole.dependencies, points, log)
        self.schedules = Pointed(whole.schedules, points, log)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

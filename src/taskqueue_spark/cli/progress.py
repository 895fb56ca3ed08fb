"""The progress display of a command: a line for each finished stage, and a progress bar for the current one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from taskqueue_cli.output import SafeConsole

Done = tuple[int, int]
"""number of finished Spark tasks, and total number of Spark tasks, in the stages that Spark currently runs"""


@dataclass
class Stage:
    """A stage of a command. When the stage ends, its ``note`` is printed next to its name."""

    note: str = ""


class Stages:
    """A display of stages: a line for each finished stage, and on a terminal a progress bar for the current one."""

    def __init__(self, console: Console | None = None) -> None:
        """Create a display on ``console``, by default stderr.

        The caller may replace ``watch``, the function that returns the progress.
        """
        self._console = console or SafeConsole(stderr=True)
        self.watch: Callable[[], Done | None] = lambda: None

    @contextmanager
    def stage(self, name: str) -> Iterator[Stage]:
        """Show a stage until the context ends; if it ends without an error, print the stage's note and duration."""
        stage = Stage()
        began = time.monotonic()
        with self._bar(name):
            yield stage
        seconds = time.monotonic() - began
        self._console.print(
            Text.assemble(
                ("✔ ", "green"), f"{name:<24}", f"{stage.note:<42}", (f"{seconds:6.1f} s", "dim")
            ),
            soft_wrap=True,
        )

    def note(self, text: str, style: str = "dim") -> None:
        """Print a line of text."""
        self._console.print(Text(text, style), soft_wrap=True)

    def _bar(self, name: str) -> AbstractContextManager[object]:
        if not self._console.is_terminal:
            return nullcontext()
        bar = _WatchedProgress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30, complete_style="cyan"),
            TextColumn("[dim]{task.fields[done]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        bar.watch = self.watch
        bar.add_task(f"{name:<24}", total=None, done="")
        return bar


class _WatchedProgress(Progress):
    """A progress bar that reads the current progress whenever it is drawn."""

    watch: Callable[[], Done | None]

    def get_renderables(self) -> Iterator[RenderableType]:
        if self.tasks and (done := self.watch()):
            count, total = done
            text = f"Spark tasks: {count:,} of {total:,}"
            self.update(self.tasks[0].id, completed=count, total=total or None, done=text)
        yield self.make_tasks_table(self.tasks)

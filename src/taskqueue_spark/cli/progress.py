"""What a person sees while Spark works: stages as they come to their end, and how far the present one is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

_EVERY = 0.2
Done = tuple[int, int]
"""tasks of Spark that are done, of how many"""


class Stage:
    """One stage; ``note`` stands beside its name when it is over."""

    def __init__(self) -> None:
        self.note = ""


class Stages:
    """Tells stages on stderr: with a bar on a terminal, elsewhere a line each."""

    def __init__(self, console: Console | None = None) -> None:
        """``watch`` is set once there is something to ask how far Spark is."""
        self._console = console or Console(stderr=True, highlight=False)
        self.watch: Callable[[], Done | None] = lambda: None

    @contextmanager
    def stage(self, name: str) -> Iterator[Stage]:
        """Tell that something is done as long as the context is open, and what came of it."""
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
        """Tell something aside."""
        self._console.print(Text(text, style), soft_wrap=True)

    @contextmanager
    def _bar(self, name: str) -> Iterator[None]:
        if not self._console.is_terminal:
            yield
            return
        bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30, complete_style="cyan"),
            TextColumn("[dim]{task.fields[done]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        with bar, _regularly(lambda: self._advance(bar)):
            bar.add_task(f"{name:<24}", total=None, done="")
            yield

    def _advance(self, bar: Progress) -> None:
        if bar.task_ids and (done := self.watch()):
            count, total = done
            shown = f"{count:,} of {total:,} tasks"
            bar.update(bar.task_ids[0], completed=count, total=total or None, done=shown)


@contextmanager
def _regularly(act: Callable[[], None]) -> Iterator[None]:
    over = threading.Event()

    def turn() -> None:
        while not over.wait(_EVERY):
            act()

    thread = threading.Thread(target=turn, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()

"""The display of a running demo: updated in place on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from rich.console import Console, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.text import Text

from taskqueue_cli.demo_frame.report import DemoReport
from taskqueue_cli.output import SafeConsole, console, print_json

_INTERVAL_SECONDS = 2.0


class Progress(Protocol):
    """The current state of a demo run, in one form for each kind of view."""

    def render(self) -> RenderableType:
        """Return the state for a display that is updated in place on a terminal."""

    def line(self) -> str:
        """Return the state as one line."""


class PlainView:
    """A view that prints one line for each event, and the state of the run every two seconds."""

    soft_wrap = True

    def __init__(self, console: Console, *, as_json: bool = False) -> None:
        """Create a view on ``console``. With ``as_json``, `end` also prints the report as JSON on stdout."""
        self._console = console
        self._as_json = as_json
        self._began = time.monotonic()
        self._last_update = self._began
        self.report: DemoReport | None = None
        """the report of the run; ``None`` until the run has ended"""

    def begin(self, heading: Text) -> AbstractContextManager[object]:
        """Print the heading. Enter the returned context for the duration of the run."""
        self._console.print(heading, soft_wrap=self.soft_wrap)
        return nullcontext()

    def event(self, text: str, style: str = "") -> None:
        """Print an event."""
        elapsed = f"{time.monotonic() - self._began:6.1f} s  "
        line = Text.assemble((elapsed, "dim"), (text, style))
        self._console.print(line, soft_wrap=self.soft_wrap)

    def update(self, progress: Progress) -> None:
        """Show the current state of the run."""
        if time.monotonic() - self._last_update >= _INTERVAL_SECONDS:
            self._last_update = time.monotonic()
            self.event(progress.line())

    def end(self, report: DemoReport) -> None:
        """Print the report."""
        self.report = report
        self._console.print(report.render())
        if self._as_json:
            print_json(report.to_dict())


class LiveView(PlainView):
    """A view that prints events as lines, and updates the state of the run in place below them."""

    soft_wrap = False

    def __init__(self, console: Console, *, as_json: bool = False) -> None:
        super().__init__(console, as_json=as_json)
        self._live = Live(console=console, refresh_per_second=12, transient=True)

    def begin(self, heading: Text) -> AbstractContextManager[object]:
        super().begin(Text.assemble(heading, "\n"))
        return self._live

    def update(self, progress: Progress) -> None:
        self._live.update(Padding(progress.render(), (1, 0, 0, 0)))

    def end(self, report: DemoReport) -> None:
        self._live.stop()
        super().end(report)


def view_for(shown: Console | None = None, *, as_json: bool = False) -> PlainView:
    """Return a live view for a terminal, otherwise a plain view. With ``as_json``, the default output is stderr."""
    shown = shown or (SafeConsole(stderr=True) if as_json else console)
    return (LiveView if shown.is_terminal else PlainView)(shown, as_json=as_json)

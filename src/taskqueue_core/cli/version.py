"""``taskqueue version``."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import typer

from taskqueue_core.cli.output import AsJson, console, print_json
from taskqueue_core.loading import installed_backends

__all__ = ["add_to"]

_DISTRIBUTION = "taskqueue-backends"


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="version")(show)


def show(*, as_json: AsJson = False) -> None:
    """Show the version, Python's, and the installed backends."""
    try:
        own = version(_DISTRIBUTION)
    except PackageNotFoundError:
        own = "unknown"
    python, backends = platform.python_version(), installed_backends()
    if as_json:
        print_json({"version": own, "python": python, "backends": backends})
        return
    console.print(
        f"taskqueue {own} (Python {python}); backends: {', '.join(backends) or 'none installed'}"
    )

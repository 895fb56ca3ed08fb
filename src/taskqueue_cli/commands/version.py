"""``taskqueue version`` and ``taskqueue --version``."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of

from taskqueue_cli.output import AsJson, console, print_json
from taskqueue_core.loading import installed_backends

_DISTRIBUTION = "taskqueue-backends"


def show(*, as_json: AsJson = False) -> None:
    """Show the version, the Python version and the installed backends."""
    try:
        own = version_of(_DISTRIBUTION)
    except PackageNotFoundError:
        own = "unknown"
    python, backends = platform.python_version(), installed_backends()
    if as_json:
        print_json({"version": own, "python": python, "backends": backends})
        return
    names = ", ".join(backends) or "none installed"
    console.print(f"taskqueue {own} (Python {python}); backends: {names}")

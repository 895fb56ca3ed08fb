"""The command line, ``taskqueue``.

Its exit codes:

====  =================================================================
0     success
1     failed: a task was refused, something was not found, or a check failed
2     wrong usage, invalid input or configuration
3     the worker is quarantined: its handlers only fail
4     the store or the server is unavailable, or refuses this process
130   interrupted
====  =================================================================
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]

_EXTRA = {"httpx2", "rich", "starlette", "structlog", "typer", "uvicorn", "websockets"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Errors are one line on stderr, never a traceback."""
    try:
        from taskqueue_cli.app import run  # noqa: PLC0415 - what it imports may not be installed
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        sys.stderr.write(
            f"error: the command line needs {error.name}: pip install 'taskqueue-backends[cli]'\n"
        )
        return 2
    return run(sys.argv[1:] if arguments is None else arguments)

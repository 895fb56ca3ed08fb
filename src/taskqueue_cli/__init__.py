"""The command line, ``taskqueue``.

Exit codes:

====  =================================================================
0     success
1     failed: a task was refused, something was not found, or a check failed
2     wrong usage, invalid input or configuration
3     the worker stopped itself, because too many attempts failed in a row
4     the store or the server is unavailable, or the server refused access
130   interrupted
====  =================================================================
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]

_EXTRA = {"httpx2", "rich", "starlette", "structlog", "typer", "uvicorn", "websockets"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. An error is printed as one line on stderr, without a traceback."""
    try:
        from taskqueue_cli.app import run  # noqa: PLC0415 - this imports typer, which is an optional dependency
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        sys.stderr.write(
            f"error: the command line needs {error.name}: pip install 'taskqueue-backends[cli]'\n"
        )
        return 2
    return run(sys.argv[1:] if arguments is None else arguments)

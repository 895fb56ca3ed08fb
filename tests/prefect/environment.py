"""Prefect, in an environment of its own: what it needs and what the project needs do not always go together.

It is made on demand, in ``.venv/prefect`` beside the project's own, of the versions in ``requirements.txt``, with this
package as it is installed by its users. Its name stands for all that and for the Python, so a changed pin makes a new
one; the package's code comes from the source tree, by ``PYTHONPATH``. A second Prefect lies beside it, without the
rest: what is first on the path counts.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.redis.engines import lacking

__all__ = ["EXAMPLES", "OTHER", "PROGRAMS", "ROOT", "made", "other_prefect", "python_with_prefect"]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PROGRAMS = HERE / "programs"
EXAMPLES = ROOT / "examples" / "prefect_socket"
PATIENCE = 900
OTHER = "3.9.1"
"""the second one, which wants certificates that are not to be had everywhere"""
_PINS = HERE / "requirements.txt"
_PROJECT = ROOT / "pyproject.toml"
_CACHE = ROOT / ".venv" / "prefect"


def python_with_prefect() -> str:
    """Return the interpreter. Skips the test where it cannot be made, in continuous integration that fails it."""
    return str(made(_PINS.read_bytes() + _PROJECT.read_bytes(), _make) / "bin" / "python")


def other_prefect() -> Path:
    """Return a folder to be put before that environment's own, with another Prefect. As `python_with_prefect`."""
    return made(OTHER.encode(), _make_other)


def made(of: bytes, make: Callable[[Path], None]) -> Path:
    """Return a folder that is made once, of what is given here and of this Python."""
    mark = hashlib.sha256(of + sys.version.encode() + sys.base_prefix.encode())
    folder = _CACHE / mark.hexdigest()[:12]
    _CACHE.mkdir(parents=True, exist_ok=True)
    # several processes of one run make it once
    with (_CACHE / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ready").exists():
            began = time.monotonic()
            make(folder)
            (folder / "ready").write_text(f"{time.monotonic() - began:.0f} s\n")
    return folder


def _make(folder: Path) -> None:
    python = folder / "bin" / "python"
    # Built by what this environment has: no other one has to be made for that.
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    _run(sys.executable, "-m", "venv", "--clear", str(folder))
    _install(python, "--require-hashes", "--requirement", str(_PINS))
    _run(*wheel, "--wheel-dir", str(folder / "own"), str(ROOT))
    _install(python, *map(str, (folder / "own").iterdir()))


def _make_other(folder: Path) -> None:
    _install(Path(sys.executable), "--upgrade", "--target", str(folder), f"prefect=={OTHER}")


def _install(python: Path, *what: str) -> None:
    """As the project's own environment was: by uv, far quicker, or by pip, which reaches more registries."""
    uv = [sys.executable, "-m", "uv", "pip", "install", "--system-certs", "--no-cache"]
    if not _complaint(*uv, "--python", str(python), "--no-deps", *what):
        return
    _run(str(python), "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps", *what)


def _run(*words: str) -> None:
    if said := _complaint(*words):
        lacking(f"Prefect cannot be installed: {said}")


def _complaint(*words: str) -> str:
    """Run a command; return what was wrong, nothing if all is well."""
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"not within {PATIENCE} s"
    said = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
    return said[-1] if done.returncode else ""

"""Prefect, in an environment of its own: what it needs and what the project needs do not always go together.

It is made on demand, in ``.venv/prefect`` beside the project's own, of the versions in ``requirements.txt``. Its name
stands for these and for the Python, so a changed pin makes a new one.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.redis.engines import lacking

__all__ = ["EXAMPLES", "PROGRAMS", "ROOT", "python_with_prefect"]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PROGRAMS = HERE / "programs"
EXAMPLES = ROOT / "examples" / "prefect_socket"
PATIENCE = 900
_PINS = HERE / "requirements.txt"
_CACHE = ROOT / ".venv" / "prefect"


def python_with_prefect() -> str:
    """Return the interpreter. Skips the test where it cannot be made, in continuous integration that fails it."""
    mark = hashlib.sha256(_PINS.read_bytes() + sys.version.encode() + sys.base_prefix.encode())
    folder = _CACHE / mark.hexdigest()[:12]
    _CACHE.mkdir(parents=True, exist_ok=True)
    with (_CACHE / "lock").open("w") as lock:  # several processes of one run make it once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ready").exists():
            began = time.monotonic()
            _make(folder)
            (folder / "ready").write_text(f"{time.monotonic() - began:.0f} s\n")
    return str(folder / "bin" / "python")


def _make(folder: Path) -> None:
    python = str(folder / "bin" / "python")
    requirements = ["--no-compile", "--no-deps", "--require-hashes", "--requirement", str(_PINS)]
    for words in (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [python, "-m", "pip", "install", "--quiet", *requirements],
    ):
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
            lacking(f"Prefect was not installed within {PATIENCE} s")
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
            lacking(f"Prefect cannot be installed: {said[-1]}")

"""Virtual environments for the compared libraries, with pinned versions, created on demand in ``.venv/bench``.

The pinned versions are in ``entries/<name>.txt``. The name of an environment is derived from these versions and from
the Python version, so a changed pin creates a new environment. Git and the checks ignore the environments, and
``dev.py clean`` removes them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ENTRIES = HERE / "entries"
CACHE = HERE.parent / ".venv" / "bench"
PATIENCE = 900


class NotMade(Exception):
    """An environment cannot be created; the message says why."""


def python_of(name: str) -> tuple[str, dict[str, str]]:
    """Return the interpreter of an environment and the variables it needs; create it if it is missing.

    The entries of this project use the current environment, with one additional package that users install for speed.
    """
    folder = _made(name)
    variables = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    variables.pop("PYTHONPATH", None)
    if name == "taskqueue":
        (packages,) = folder.glob("lib/python*/site-packages")
        variables["PYTHONPATH"] = str(packages)
        return sys.executable, variables
    return str(folder / "bin" / "python"), variables


def _made(name: str) -> Path:
    pins = ENTRIES / f"{name}.txt"
    mark = hashlib.sha256(pins.read_bytes() + sys.version.encode() + sys.prefix.encode())
    folder = CACHE / f"{name}-{mark.hexdigest()[:12]}"
    ready = folder / "ready"
    if ready.exists():
        return folder
    print(f"making the environment of {name}", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    _run("-m", "venv", str(folder))
    _run(
        "-m", "pip", "install", "--quiet", "--requirement", str(pins), python=folder / "bin/python"
    )
    ready.touch()
    return folder


def _run(*words: str, python: Path | str = sys.executable) -> None:
    done = subprocess.run(
        [python, *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
        raise NotMade(f"{' '.join(words[:3])}: {said[-1]}")

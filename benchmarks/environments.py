"""A virtual environment per peer, with every version pinned, made on demand in ``.venv/bench``.

The pins are in ``entries/<name>.txt``. The name of an environment is derived from its pins and its Python, so a new pin
creates a new one. The environments are next to the project's own, ignored by git and the checks, and removed with it.
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

    Our own entry uses the running environment with its locked versions, plus one package that users add for speed.
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

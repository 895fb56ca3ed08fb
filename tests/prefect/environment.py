"""Prefect in a Python environment of its own, because its requirements may conflict with this project's.

The environment is created on demand below ``.venv/prefect``, with the versions in ``requirements.txt`` and the entry
points of this package. Its name depends on the pins and the Python, so a changed pin creates a new one. The package's
code comes from the source tree, through ``PYTHONPATH``. A copy in the environment would be out of date soon, and the
servers that Prefect's command starts would use it, because they have the environment's folder first on the path. Each
other version of Prefect is in a folder of its own, and is used if its folder comes first on the path.
"""

from __future__ import annotations

import shutil
import sys
from functools import partial
from pathlib import Path

from tests.binaries.folders import ROOT, Unavailable, announce, install, made, run

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
EXAMPLES = ROOT / "examples" / "prefect_socket"
OLDEST, MIDDLE, OTHER = "3.4.25", "3.6.0", "3.9.1"
"""the oldest version of Prefect that is supported, one in the middle, and the newest"""
_FORMER = ("fastapi==0.118.0", "importlib_metadata==8.7.0", "starlette==0.48.0", "zipp==3.23.0")
"""requirements of the releases before 3.7 that are not among the pins, or of which they need an older version"""
_PINS = HERE / "requirements.txt"
_PROJECT = ROOT / "pyproject.toml"


def python_with_prefect() -> str:
    """Return the interpreter with Prefect. Its environment is created at the first call. Raises `Unavailable`."""
    folder = made("prefect", _PINS.read_bytes() + _PROJECT.read_bytes() + b"entry points", _make)
    return str(folder / "bin" / "python")


def other_prefect(version: str = OTHER) -> Path:
    """Return a folder with another version of Prefect, to be put first on the path. Raises `Unavailable`."""
    packages = [f"prefect=={version}", *(() if version == OTHER else _FORMER)]
    return made("prefect", " ".join(packages).encode(), partial(_make_other, packages))


def _make(folder: Path) -> None:
    announce("Prefect", "prefect and what it needs", 90)
    python = str(folder / "bin" / "python")
    # This environment already has the build backend, so no isolated build environment is needed.
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    try:
        run(sys.executable, "-m", "venv", "--clear", str(folder))
        install(python, "--require-hashes", "--requirement", str(_PINS))
        run(*wheel, "--wheel-dir", str(folder / "own"), str(ROOT))
        install(python, *map(str, (folder / "own").iterdir()))
        for copy in folder.glob("lib/python*/site-packages/taskqueue_*/__init__.py"):
            shutil.rmtree(copy.parent)
    except Unavailable as error:
        raise Unavailable(f"Prefect, which the tests need, cannot be installed: {error}") from None


def _make_other(packages: list[str], folder: Path) -> None:
    announce(packages[0], "prefect", 9)
    install(sys.executable, "--upgrade", "--target", str(folder), *packages)

"""Prefect, in an environment of its own: what it needs and what the project needs do not always go together.

It is made on demand, in ``.venv/prefect`` beside the project's own, of the versions in ``requirements.txt``, with this
package as it is installed by its users. Its name stands for all that and for the Python, so a changed pin makes a new
one; the package's code comes from the source tree, by ``PYTHONPATH``. A second Prefect lies beside it, without the
rest: what is first on the path counts.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.binaries.folders import ROOT, Unavailable, announce, install, made, run

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
EXAMPLES = ROOT / "examples" / "prefect_socket"
OTHER = "3.9.1"
"""the second one, which wants certificates that are not to be had everywhere"""
_PINS = HERE / "requirements.txt"
_PROJECT = ROOT / "pyproject.toml"


def python_with_prefect() -> str:
    """Return the interpreter, with its environment made at the first call. Raises `Unavailable`."""
    folder = made("prefect", _PINS.read_bytes() + _PROJECT.read_bytes(), _make)
    return str(folder / "bin" / "python")


def other_prefect() -> Path:
    """Return a folder to be put before that environment's own, with another Prefect. As `python_with_prefect`."""
    return made("prefect", OTHER.encode(), _make_other)


def _make(folder: Path) -> None:
    announce("Prefect", "prefect and what it needs", 90)
    python = str(folder / "bin" / "python")
    # Built by what this environment has: no other one has to be made for that.
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    try:
        run(sys.executable, "-m", "venv", "--clear", str(folder))
        install(python, "--require-hashes", "--requirement", str(_PINS))
        run(*wheel, "--wheel-dir", str(folder / "own"), str(ROOT))
        install(python, *map(str, (folder / "own").iterdir()))
    except Unavailable as error:
        raise Unavailable(f"Prefect, which the tests need, cannot be installed: {error}") from None


def _make_other(folder: Path) -> None:
    announce(f"Prefect {OTHER}", "prefect", 9)
    install(sys.executable, "--upgrade", "--target", str(folder), f"prefect=={OTHER}")

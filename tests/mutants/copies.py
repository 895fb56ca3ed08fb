"""A copy of the project in which files are changed."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
_COPIED = (
    "src", "tests", "docs", "examples", "tools", "deploy", "benchmarks", "dev.py", "pyproject.toml", "README.md",
    "requirements.lock",
)  # fmt: skip


class Copy:
    """A copy of the project's files in a folder; the files themselves are never touched."""

    def __init__(self, folder: Path, root: Path = ROOT) -> None:
        self.folder = folder
        self._second = 0
        ignore = shutil.ignore_patterns("__pycache__", "results", "*.pyc")
        for name in _COPIED:
            if (root / name).is_dir():
                shutil.copytree(root / name, folder / name, ignore=ignore)
            elif (root / name).exists():
                shutil.copy(root / name, folder / name)
        (folder / ".venv").symlink_to(
            root / ".venv"
        )  # programs that tests run were fetched into it

    @contextlib.contextmanager
    def changed(self, name: str, source: str) -> Iterator[None]:
        """Have another source in a file for a while."""
        path = self.folder / name
        before, since = path.read_text(), path.stat()
        path.write_text(source)
        # Bytecode is known by the size and the full second of its source: each change has a second of its own.
        self._second += 1
        os.utime(path, (self._second, self._second))
        try:
            yield
        finally:
            path.write_text(before)
            os.utime(path, ns=(since.st_atime_ns, since.st_mtime_ns))

"""A copy of the project in which mutants are written to files."""

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
    """A copy of the project in a folder, so that the original files are never changed."""

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
        )  # because it has server programs that tests have downloaded

    @contextlib.contextmanager
    def changed(self, name: str, source: str) -> Iterator[None]:
        """Replace the content of a file until the block ends."""
        path = self.folder / name
        before, since = path.read_text(), path.stat()
        path.write_text(source)
        # Python recognises outdated bytecode by the size and the full second of its source, so each change gets another
        # second.
        self._second += 1
        os.utime(path, (self._second, self._second))
        try:
            yield
        finally:
            path.write_text(before)
            os.utime(path, ns=(since.st_atime_ns, since.st_mtime_ns))

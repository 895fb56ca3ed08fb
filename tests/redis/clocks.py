"""A wall clock of a redis-server that a test can set, while the server runs."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

from tests.redis.losses import build_shim


class WallClock:
    """The wall clock of servers that are started with its ``environment``."""

    def __init__(self, folder: Path) -> None:
        """Prepare the clock with its files in ``folder``. It is right at first."""
        self._file = folder / "clock-offset"
        self.set(0.0)
        library = build_shim(folder, "clock")
        self.environment: Mapping[str, str] = {
            "LD_PRELOAD": str(library),
            "CLOCK_OFFSET": str(self._file),
        }

    def set(self, seconds: float) -> None:
        """Set the clock to this many seconds ahead of the right time."""
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("=q", round(seconds * 1e9)))

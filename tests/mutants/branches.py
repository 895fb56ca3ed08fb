"""placeholder"""
from pathlib import Path
from collections.abc import Callable
def measure(path: Path | None, say: Callable[[str], None]) -> int:
    return 0

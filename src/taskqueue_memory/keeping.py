"""How a journal of the memory backend outlives it: entry point ``memory`` of the group ``taskqueue.journals``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

__all__ = ["keep", "variables"]


def variables(path: Path) -> Mapping[str, str]:
    """Have the server write into the file."""
    return {"TASKQUEUE_MEMORY_JOURNAL": str(path)}


async def keep(key: str, path: Path, since: float, store: Mapping[str, str]) -> None:
    """Do nothing: it is there."""

"""What the demonstration can be told."""

from __future__ import annotations

from pathlib import Path

import msgspec

__all__ = ["DemoOptions"]


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    path: Path
    """a folder, or one file"""
    backend: str
    """the word that the server is given"""
    embedded: bool = False
    """have the server run a store for it, in a folder that is removed at the end"""
    workers: int = 2
    limit: int | None = None
    """the most files to take"""
    journal: Path | None = None
    """keep the journal of the run in this file"""
    keep_going: bool = False
    """leave server and workers running after the report, until interrupted"""

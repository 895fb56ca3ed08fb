"""What the demonstration can be told."""

from __future__ import annotations

import msgspec

__all__ = ["DemoOptions"]


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    backend: str
    """the word that names the backend"""
    embedded: bool = False
    """run a store for it, in a folder that is removed at the end"""
    jobs: int = 200
    """how many jobs are submitted"""
    seed: int = 0
    """of the jobs, and of how the servers behave"""
    port: int = 0
    """where the server with the dashboard listens; 0 takes a free one"""
    keep_going: bool = False
    """leave the server and the simulated ones running after the report, until interrupted"""

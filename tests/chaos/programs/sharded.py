"""The Redis backend with shards, under a word of its own: as a queue of the package has it."""

from __future__ import annotations

from taskqueue_core.backend import Backend
from taskqueue_core.loading import load_backend
from taskqueue_core.sharding.backend import ShardedBackend


def create_backend() -> Backend:
    """Make it by the settings of Redis."""
    return ShardedBackend(load_backend("redis"))

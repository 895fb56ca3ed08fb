"""A backend module for chaos runs: the Redis backend with support for shards."""

from __future__ import annotations

from taskqueue_core.backend import Backend
from taskqueue_core.loading import load_backend
from taskqueue_core.sharding.backend import ShardedBackend


def create_backend() -> Backend:
    """Create the backend with the Redis settings of the environment."""
    return ShardedBackend(load_backend("redis"))

"""How the core's programs come by an embedded Redis: entry point ``redis`` of the group ``taskqueue.embedded``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from taskqueue_core.config import load_settings
from taskqueue_redis.binaries import find_binary
from taskqueue_redis.config import RedisSettings
from taskqueue_redis.embedded import EmbeddedRedis

__all__ = ["prepare", "run", "wanted"]


def wanted() -> bool:
    """Tell whether the settings name no Redis, so that one is missing. Raises `ConfigurationError`."""
    return "url" not in load_settings(RedisSettings).model_fields_set


def prepare() -> None:
    """Find a redis-server, or fetch one, which can take a while. Raises `ConfigurationError`."""
    find_binary()


@contextmanager
def run(directory: Path) -> Iterator[Mapping[str, str]]:
    """Run a Redis with its files in ``directory`` as long as the context is open.

    Gives the environment variables by which the backend finds it. Raises `ConfigurationError`.
    """
    with EmbeddedRedis(directory) as redis:
        yield {"TASKQUEUE_REDIS_URL": redis.url}

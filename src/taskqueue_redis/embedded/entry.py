"""The embedded store of the Redis backend: entry point ``redis`` of the group ``taskqueue.embedded``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from taskqueue_core.config import load_settings
from taskqueue_redis.config import RedisSettings
from taskqueue_redis.embedded.server import EmbeddedRedis


def wanted() -> bool:
    """Return whether an embedded server is needed: whether no Redis URL is set. Raises `ConfigurationError`."""
    return "url" not in load_settings(RedisSettings).model_fields_set


@contextmanager
def run(directory: Path) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Run a server with its files in ``directory`` while the context is open.

    Yield the server's product and version, and the environment variables with which the backend finds the server.
    Raises `ConfigurationError`.
    """
    with EmbeddedRedis(directory) as redis:
        yield redis.name, {"TASKQUEUE_REDIS_URL": redis.url}

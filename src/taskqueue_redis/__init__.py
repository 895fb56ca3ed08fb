"""The Redis backend: durable, shared by all processes that use the same Redis, with one round trip per batch."""

from taskqueue_redis.backend import RedisBackend, create_backend
from taskqueue_redis.config import RedisSettings

__all__ = ["RedisBackend", "RedisSettings", "create_backend"]

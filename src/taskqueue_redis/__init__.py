"""The Redis backend: durable, shared by every process that uses the same Redis, one round trip per batch.

`backend` puts it together. A task passes through `publisher`, a script of `lua/`, and `subscription`;
`docs/redis.md` describes how it is stored.
"""

from taskqueue_redis.backend import RedisBackend, create_backend
from taskqueue_redis.config import RedisSettings

__all__ = ["RedisBackend", "RedisSettings", "create_backend"]

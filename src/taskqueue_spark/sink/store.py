"""Which store a job of Spark reads and writes, as options say it, and how its processes open it.

Options travel with the job and Spark shows them, so a password is never among them: it is in the environment of the
processes that need it, as ever (TASKQUEUE_REDIS_PASSWORD, TASKQUEUE_REDIS_PASSWORD_FILE), or in a variable with the
whole URL, whose name the option ``urlEnv`` has. On a cluster Spark passes variables on by ``spark.executorEnv.NAME``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Self
from urllib.parse import urlsplit

import msgspec

from taskqueue_core.assembly import open_backend
from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import Control, control_of
from taskqueue_core.config import load_settings
from taskqueue_core.errors import ConfigurationError, InvalidInput
from taskqueue_core.sharding.backend import ShardedBackend
from taskqueue_redis.config import RedisSettings

STORE_OPTIONS = ("backend", "url", "urlEnv", "prefix", "partitions")
_REDIS, _SERVER = "redis", "server"
_URLS = {_REDIS: "TASKQUEUE_REDIS_URL", _SERVER: "TASKQUEUE_SERVER_URL"}
_opening = threading.Lock()


class SparkStore(msgspec.Struct, frozen=True, kw_only=True):
    """A backend by its word, and what differs from the settings in the environment. Holds no secret."""

    name: str = _REDIS
    url: str | None = None
    url_env: str | None = None
    prefix: str | None = None
    partitions: int | None = None

    @classmethod
    def read(cls, options: Mapping[str, str]) -> Self:
        """Read the options of `STORE_OPTIONS`, whatever their case. Raises `InvalidInput` or `ConfigurationError`."""
        given = {name.lower(): value for name, value in options.items()}
        token, url, variable = given.get("backend", _REDIS), given.get("url"), given.get("urlenv")
        if url is not None and variable is not None:
            raise ConfigurationError("options url and urlEnv: both are set; allowed: one of them")
        if (url or variable) and token not in _URLS:
            raise ConfigurationError(
                "option url: set; allowed with the backends redis and server: others have settings of their own"
            )
        if url is not None and _has_password(url):
            raise InvalidInput(
                "option url",
                "a URL with a password, which Spark would show",
                "a URL without one: TASKQUEUE_REDIS_PASSWORD has it, or option urlEnv names a variable with the URL",
            )
        partitions = given.get("partitions")
        if partitions is not None and not (partitions.isascii() and partitions.isdigit()):
            raise InvalidInput("option partitions", "text that is not a whole number", "1 to 1024")
        if token != _REDIS and (given.get("prefix") is not None or partitions is not None):
            raise ConfigurationError(
                "options prefix and partitions: set; allowed with: backend=redis"
            )
        return cls(
            name=token,
            url=url,
            url_env=variable,
            prefix=given.get("prefix"),
            partitions=None if partitions is None else int(partitions),
        )

    def redis_settings(self) -> RedisSettings:
        """Return the settings of the Redis that is meant. Raises `ConfigurationError`."""
        if self.name != _REDIS:
            raise ConfigurationError("option backend: not supported here; allowed: redis")
        with self._environment():
            return load_settings(RedisSettings)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Backend]:
        """Open the backend, with shards, hooks and a migration as every process has them, and close it.

        Raises `ConfigurationError`, for one that lives in a single process too: nobody would see what is written.
        """
        with self._environment():
            backend = open_backend(self.name)
        try:
            if not backend.capabilities.shared:
                raise ConfigurationError(
                    "option backend: this backend is visible to one process only; use a "
                    "shared backend, for example redis"
                )
            yield backend
        finally:
            await backend.aclose()

    @contextmanager
    def _environment(self) -> Iterator[None]:
        """Have backends that are made meanwhile read the options as if the environment said so."""
        url = self.url
        if self.url_env is not None:
            url = os.environ.get(self.url_env)
            if not url:
                raise ConfigurationError(
                    f"option urlEnv: there is no variable {self.url_env[:100]!r} in this "
                    "process; on a cluster, set it with spark.executorEnv"
                )
        fields = {
            _URLS.get(self.name, ""): url,
            "TASKQUEUE_REDIS_PREFIX": self.prefix,
            "TASKQUEUE_REDIS_PARTITIONS": None if self.partitions is None else str(self.partitions),
        }
        names = {name: value for name, value in fields.items() if value is not None}
        with _opening:
            before = {name: os.environ.get(name) for name in names}
            os.environ.update(names)
            try:
                yield
            finally:
                for name, value in before.items():
                    if value is None:
                        del os.environ[name]
                    else:
                        os.environ[name] = value


def positions_of(backend: Backend) -> Control:
    """Return the control that knows queues as a journal calls them: each shard by its own name."""
    inner = getattr(backend, "inner", backend)
    if isinstance(inner, ShardedBackend):
        return inner.members[0].control
    return control_of(backend)


def _has_password(url: str) -> bool:
    try:
        return urlsplit(url).password is not None
    except ValueError:
        return "@" in url

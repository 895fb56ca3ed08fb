"""The store that a Spark job reads or writes, and how the processes of the job open it.

Spark sends options to every process of the job and shows them, so they never contain a password. Set a password
in the environment of the processes that need it (TASKQUEUE_REDIS_PASSWORD, TASKQUEUE_REDIS_PASSWORD_FILE), or in a URL
in the variable that the option ``urlEnv`` names. On a cluster, set such variables with ``spark.executorEnv.NAME``.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Self
from urllib.parse import urlsplit

import msgspec
from pyspark import TaskContext

from taskqueue_core.assembly import open_backend
from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import Control, control_of
from taskqueue_core.config import load_settings
from taskqueue_core.errors import ConfigurationError, InvalidInput
from taskqueue_core.sharding.backend import ShardedBackend
from taskqueue_redis.config import RedisSettings
from taskqueue_spark.option_values import OptionValues

STORE_OPTIONS = ("backend", "url", "urlEnv", "prefix", "partitions")
_REDIS, _SERVER = "redis", "server"
_URLS = {_REDIS: "TASKQUEUE_REDIS_URL", _SERVER: "TASKQUEUE_SERVER_URL"}
_opening = threading.Lock()


def _of_first_task(record: logging.LogRecord) -> bool:
    """Return whether to log a record. Only the first task of a Spark stage logs what a check of the servers found."""
    context = TaskContext.get()
    return record.module != "checks" or context is None or context.partitionId() == 0


logging.getLogger("taskqueue.redis").addFilter(_of_first_task)


class SparkStore(msgspec.Struct, frozen=True, kw_only=True):
    """The name of a backend, and the settings that differ from those in the environment. It contains no secret."""

    name: str = _REDIS
    url: str | None = None
    url_env: str | None = None
    prefix: str | None = None
    partitions: int | None = None

    @classmethod
    def read(cls, options: Mapping[str, str], name: str | None = None) -> Self:
        """Convert the options that `STORE_OPTIONS` lists. ``name``: the backend, in place of the option ``backend``.

        Raises `InvalidInput` or `ConfigurationError`.
        """
        given = OptionValues(options)
        name = name or given.get("backend", _REDIS)
        url, variable, prefix = given.text("url"), given.text("urlEnv"), given.text("prefix")
        if url is not None and variable is not None:
            raise ConfigurationError("options url and urlEnv: both are set; allowed: one of them")
        if (url or variable) and name not in _URLS:
            raise ConfigurationError(
                "options url and urlEnv are allowed only with the backends redis and server, because other "
                "backends have their own settings"
            )
        if url is not None and _has_password(url):
            raise InvalidInput(
                "option url",
                "a URL with a password, which Spark would show",
                "a URL without a password; set option urlEnv to the name of an environment variable that holds the "
                "URL, or, with backend=redis, set the password in TASKQUEUE_REDIS_PASSWORD",
            )
        partitions = given.whole("partitions", 1, 1024)
        if name != _REDIS and (prefix is not None or partitions is not None):
            raise ConfigurationError(
                "options prefix and partitions are allowed only with backend=redis"
            )
        return cls(name=name, url=url, url_env=variable, prefix=prefix, partitions=partitions)

    def redis_settings(self) -> RedisSettings:
        """Return the settings of this Redis store. Raises `ConfigurationError` for another backend."""
        if self.name != _REDIS:
            raise ConfigurationError("option backend: only redis is supported here")
        with self._environment():
            return load_settings(RedisSettings)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Backend]:
        """Open the backend as every process does, with its shards, hooks and migration, and close it at the end.

        Raises `ConfigurationError`, also for a backend that only one process can see, because other processes would not
        see its tasks.
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
        """Set the options as environment variables while the context is open, for a backend that is opened in it."""
        url = self.url
        if self.url_env is not None:
            url = os.environ.get(self.url_env)
            if not url:
                raise ConfigurationError(
                    f"option urlEnv: there is no environment variable {self.url_env[:100]!r} in this "
                    "process; on a cluster, set it with spark.executorEnv"
                )
        fields = {
            _URLS.get(self.name, ""): url,
            "TASKQUEUE_REDIS_PREFIX": self.prefix,
            "TASKQUEUE_REDIS_PARTITIONS": None if self.partitions is None else str(self.partitions),
        }
        names = {name: value for name, value in fields.items() if value is not None}
        with _opening:
            before = {name: os.environ[name] for name in names if name in os.environ}
            os.environ.update(names)
            try:
                yield
            finally:
                for name in names:
                    del os.environ[name]
                os.environ.update(before)


def positions_of(backend: Backend) -> Control:
    """Return the control of a backend in which each shard is a queue with its own name, as in a journal."""
    inner = getattr(backend, "inner", backend)
    if isinstance(inner, ShardedBackend):
        return inner.members[0].control
    return control_of(backend)


def _has_password(url: str) -> bool:
    try:
        return urlsplit(url).password is not None
    except ValueError:
        return "@" in url

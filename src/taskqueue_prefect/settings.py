"""What the integration can be told: ``TASKQUEUE_PREFECT_…``, and names that Prefect's own settings have for the same.

The backend is ``TASKQUEUE_BACKEND``, and its settings are its own (``TASKQUEUE_REDIS_…``). Where a name of this package
is not set, one of Prefect's manner counts: see `ALIASES` and `redis_url`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated
from urllib.parse import quote

from dotenv import dotenv_values
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

BACKEND = "TASKQUEUE_BACKEND"
"""without it, and without an alias of it, Prefect's own queue stays"""
_REDIS_URL = "TASKQUEUE_REDIS_URL"
_MESSAGING = "PREFECT_REDIS_MESSAGING_"
ALIASES: Mapping[str, tuple[str, ...]] = {
    BACKEND: ("BACKEND",),
    "TASKQUEUE_REDIS_LEASE": ("INFLIGHT_VISIBILITY_TIMEOUT",),
    "TASKQUEUE_PREFECT_MAX_LOSSES": ("STREAM_MAX_RETRIES",),
}
"""what counts where the first is not set, after each of `PREFIXES`"""
PREFIXES = ("PREFECT_SERVER_TASKS_SCHEDULING_", "PREFECT_TASK_SCHEDULING_")
MODULES: Mapping[str, str] = {
    "prefect.server.task_queue.memory": "memory",
    "prefect_redis.task_queue": "redis",
    "prefect_redis.task_queues": "redis",
}
"""what other work on the same calls backends of this kind"""
_Seconds = Annotated[float, Field(gt=0, le=30 * 86_400, allow_inf_nan=False)]


class PrefectSettings(BaseSettings):
    """Durations are seconds."""

    model_config = SettingsConfigDict(
        env_prefix="TASKQUEUE_PREFECT_", env_file=".env", extra="ignore", frozen=True
    )

    strict: bool = False
    """refuse to start a server that would use Prefect's own queue, or whose code is not the one that is known"""
    capacity: int | None = Field(default=None, ge=1, le=1_000_000_000)
    """how many runs of a task may wait that no worker has been sent; unset: Prefect's ``max_scheduled_queue_size``"""
    max_losses: int = Field(default=5, ge=0, le=1000)
    """how often a run may vanish with a server before it becomes a dead letter"""
    patience: _Seconds = 1.0
    """how long a request waits for the store before it is answered with 503"""
    reconcile: _Seconds = 10.0
    """how often the database is searched for runs that the queue should have, and has not"""
    grace: _Seconds = 30.0
    """how long something must look lost before it is put in again: longer than events take to the database"""
    held: _Seconds = 3600.0
    """how long a worker that has accepted a run, and has connected anew since, may take to begin it"""
    remember: _Seconds = 6 * 3600.0
    """how long it is known who accepted a run"""


def environment(variables_given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that follow from Prefect's and from ``.env``: what is set is not among them."""
    variables = dict(os.environ if variables_given is None else variables_given)
    derived = {} if variables_given is not None else _from_file(variables)
    variables |= derived
    for name, names in ALIASES.items():
        values = [
            variables[prefix + name]
            for name in names
            for prefix in PREFIXES
            if prefix + name in variables
        ]
        if values and name not in variables:
            derived[name] = values[0]
    if BACKEND in derived:
        derived[BACKEND] = MODULES.get(derived[BACKEND], derived[BACKEND])
    if (derived | variables).get(BACKEND) == "redis" and _REDIS_URL not in variables:
        url = redis_url(variables)
        if url is not None:
            derived[_REDIS_URL] = url
    return derived


def _from_file(values: Mapping[str, str]) -> dict[str, str]:
    ours = ("TASKQUEUE_", _MESSAGING, *PREFIXES)
    return {
        name: value
        for name, value in dotenv_values(".env").items()
        if value is not None and name.startswith(ours) and name not in values
    }


def redis_url(values: Mapping[str, str]) -> str | None:
    """Return where Prefect's own messages are, ``None`` where nothing is said of that."""
    options = {
        name.removeprefix(_MESSAGING).lower(): value
        for name, value in values.items()
        if name.startswith(_MESSAGING) and value
    }
    if "url" in options:
        return options["url"]
    if not options.keys() & {"host", "port", "db", "username", "password", "ssl"}:
        return None
    scheme = (
        "rediss"
        if options.get("ssl", "").lower() in {"1", "true", "t", "yes", "y", "on"}
        else "redis"
    )
    user = ""
    if "password" in options:
        name = options.get("username", "default")
        user = f"{quote(name, safe='')}:{quote(options['password'], safe='')}@"
    host = options.get("host", "localhost")
    host = f"[{host}]" if ":" in host else host
    return f"{scheme}://{user}{host}:{options.get('port', '6379')}/{options.get('db', '0')}"

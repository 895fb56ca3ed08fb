"""The settings of the integration: ``TASKQUEUE_PREFECT_…``, and Prefect's names for the same settings.

``TASKQUEUE_BACKEND`` names the backend, which has settings of its own (``TASKQUEUE_REDIS_…``). If a variable of this
package is not set, Prefect's variable for the same setting applies, if there is one: see `ALIASES` and `redis_url`.
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
"""environment variable that names the backend; if neither it nor an alias is set, Prefect's own queue is used"""
STRICT = "TASKQUEUE_PREFECT_STRICT"
_REDIS_URL = "TASKQUEUE_REDIS_URL"
_MESSAGING = "PREFECT_REDIS_MESSAGING_"
ALIASES: Mapping[str, tuple[str, ...]] = {
    BACKEND: ("BACKEND",),
    "TASKQUEUE_REDIS_LEASE": ("INFLIGHT_VISIBILITY_TIMEOUT",),
    "TASKQUEUE_PREFECT_MAX_LOSSES": ("STREAM_MAX_RETRIES",),
}
"""variables of taskqueue, each with the Prefect variables (without their prefix) that apply if it is not set"""
PREFIXES = ("PREFECT_SERVER_TASKS_SCHEDULING_", "PREFECT_TASK_SCHEDULING_")
MODULES: Mapping[str, str] = {
    "prefect.server.task_queue.memory": "memory",
    "prefect_redis.task_queue": "redis",
    "prefect_redis.task_queues": "redis",
}
"""name of the backend for each module name that Prefect's variable for the backend may contain"""
_Seconds = Annotated[float, Field(gt=0, le=30 * 86_400, allow_inf_nan=False)]


class PrefectSettings(BaseSettings):
    """The settings of the integration. Durations are in seconds."""

    model_config = SettingsConfigDict(
        env_prefix="TASKQUEUE_PREFECT_", env_file=".env", extra="ignore", frozen=True
    )

    strict: bool = False
    """whether a server refuses to start if it would use Prefect's own queue, or if Prefect's code is unsupported"""
    capacity: int | None = Field(default=None, ge=1, le=1_000_000_000)
    """maximum number of undelivered runs of a task; default: Prefect's ``max_scheduled_queue_size``"""
    max_losses: int = Field(default=5, ge=0, le=1000)
    """number of times that a run may be lost because a server crashed, before it becomes a dead letter"""
    patience: _Seconds = 1.0
    """seconds that a request waits for the store before it is answered with 503"""
    reconcile: _Seconds = 10.0
    """seconds between searches of the database for runs that are missing from the queue"""
    grace: _Seconds = 30.0
    """seconds for which a run must be missing before it is enqueued again; longer than Prefect takes to store events"""
    held: _Seconds = 3600.0
    """seconds after which a run is enqueued again although the worker that accepted it has reconnected"""
    remember: _Seconds = 6 * 3600.0
    """seconds for which the queue remembers a run that was accepted, and the worker that accepted it"""


def environment(variables_given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that Prefect's variables and ``.env`` imply, without those that are already set."""
    variables = dict(os.environ if variables_given is None else variables_given)
    derived = {}
    if variables_given is None:
        ours = ("TASKQUEUE_", _MESSAGING, *PREFIXES)
        derived = {
            name: value
            for name, value in dotenv_values(".env").items()
            if value is not None and name.startswith(ours) and name not in variables
        }
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


def redis_url(values: Mapping[str, str]) -> str | None:
    """Return the URL of Prefect's message broker on Redis; ``None`` if no broker is configured."""
    options = {
        name.removeprefix(_MESSAGING).lower(): value
        for name, value in values.items()
        if name.startswith(_MESSAGING) and value
    }
    if "url" in options:
        return options["url"]
    if not options.keys() & {"host", "port", "db", "username", "password", "ssl"}:
        return None
    scheme = "rediss" if is_true(options.get("ssl", "")) else "redis"
    user = ""
    if "password" in options:
        name = options.get("username", "default")
        user = f"{quote(name, safe='')}:{quote(options['password'], safe='')}@"
    host = options.get("host", "localhost")
    host = f"[{host}]" if ":" in host else host
    return f"{scheme}://{user}{host}:{options.get('port', '6379')}/{options.get('db', '0')}"


def is_true(text: str) -> bool:
    """Return whether the text of a variable means true, as in Prefect's settings."""
    return text.lower() in {"1", "true", "t", "yes", "y", "on"}

"""The dispatcher's settings, from variables ``TASKQUEUE_DISPATCH_…`` or ``.env``. Commas separate a list's items."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from taskqueue_core.config import COMMAS

_Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


class DispatchSettings(BaseSettings):
    """Settings of a dispatcher. Durations are in seconds, sizes in bytes."""

    model_config = SettingsConfigDict(
        env_prefix="TASKQUEUE_DISPATCH_", env_file=".env", extra="ignore", frozen=True
    )

    lease: _Seconds = 30.0
    """seconds after which a lease that is not renewed expires; each lease is renewed after a third of this time"""
    safety_pass: _Seconds = 2.0
    """seconds after which the dispatcher looks for free slots and changed models even without a notification"""
    health_interval: _Seconds = 10.0
    """seconds between two health checks of a server"""
    settled: _Seconds = 4.0
    """minimum seconds between two health reports; if both omit a job, the second one ends the lease of the job

    Choose a time longer than a server needs to report a new job.
    """
    partition: _Seconds = 30.0
    """seconds for which a server may be unreachable before the jobs that it runs count as lost"""
    turn: _Seconds = 10.0
    """seconds for which a model may keep a shared server (see ``together`` of an endpoint) while other models wait"""
    drain: float = Field(default=10.0, ge=0, le=3600, allow_inf_nan=False)
    """seconds for which a stopping dispatcher waits for its running jobs"""
    find_timeout: _Seconds = 30.0
    """default number of seconds for which a caller of ``find_endpoint`` waits for a slot"""
    endpoints_allowed: Annotated[tuple[str, ...], *COMMAS] = ("127.0.0.0/8", "::1/128")
    """networks and hosts (such as ``gpu.example.com`` or ``*.example.com``) where endpoints may be registered and
    called; the default is this machine only, because a client with an ``admin`` token chooses the address"""
    tls_ca: Path | None = None
    """PEM file of certificate authorities with which servers are verified, instead of the system's authorities"""
    answer_limit: int = Field(default=256 * 1024, ge=1024, le=256 * 1024)
    """largest response of a server in bytes, and therefore the largest result"""
    breaker_failures: int = Field(default=5, ge=1, le=1000)
    """number of consecutive failures after which an endpoint is paused"""
    breaker_rest: _Seconds = 10.0
    """length in seconds of an endpoint's first pause; each further failure doubles the pause, up to 5 minutes"""
    busy_rest: _Seconds = 0.5
    """seconds for which a busy endpoint is paused if its response has no ``Retry-After``"""
    webhook_secrets: Annotated[tuple[SecretStr, ...], *COMMAS] = ()
    """secrets (``whsec_…``) with which every callback is signed; during a rotation, set both the old and the new one"""
    callback_ports: Annotated[tuple[int, ...], *COMMAS] = (443, 8443)
    """ports to which callbacks may be sent"""
    callback_http: bool = False
    """whether to allow callbacks to http:// URLs, which anyone on the network path can read and change"""
    callback_networks: Annotated[tuple[str, ...], *COMMAS] = ()
    """private networks in which callbacks are allowed; all other private addresses are refused"""
    callback_timeout: _Seconds = 20.0
    """maximum number of seconds for one attempt to send a callback"""
    callback_attempts: int = Field(default=12, ge=1, le=1000)
    """number of attempts after which a callback becomes a dead letter"""
    callbacks_at_once: int = Field(default=64, ge=1, le=10_000)
    """maximum number of callbacks that a process sends at the same time"""
    callbacks_per_host: int = Field(default=4, ge=1, le=1000)
    """maximum number of callbacks that a process sends to one host at the same time"""

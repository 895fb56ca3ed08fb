"""The dispatcher's settings: ``TASKQUEUE_DISPATCH_…``; items of lists are separated by commas."""

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
    """how long a slot stays leased to a dispatcher that no longer renews it; renewed every third of this"""
    safety_pass: _Seconds = 2.0
    """how often free slots are looked for, even without a notification"""
    health_interval: _Seconds = 10.0
    """how often the health of each server is checked"""
    settled: _Seconds = 5.0
    """time between the two equal observations that end a lease; longer than a server takes to count a new job"""
    partition: _Seconds = 30.0
    """how long a server may be unreachable before its running job is considered lost"""
    turn: _Seconds = 10.0
    """how long a model with jobs keeps a server for which other models wait: see ``together`` of an endpoint"""
    drain: float = Field(default=10.0, ge=0, le=3600, allow_inf_nan=False)
    """how long a stopping dispatcher waits for its running jobs"""
    find_timeout: _Seconds = 30.0
    """how long a call of ``find_endpoint`` may wait in the queue"""
    endpoints_allowed: Annotated[tuple[str, ...], *COMMAS] = (
        "127.0.0.0/8", "::1/128", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7",
    )  # fmt: skip
    """networks, and hosts such as ``gpu.example.com`` or ``*.example.com``, in which endpoints are allowed"""
    tls_ca: Path | None = None
    """file of certificate authorities (PEM) that verify the servers, instead of the system's"""
    answer_limit: int = Field(default=256 * 1024, ge=1024, le=256 * 1024)
    """largest answer of a server that is read, and so the largest result"""
    breaker_failures: int = Field(default=5, ge=1, le=1000)
    """consecutive failures after which an endpoint gets no jobs for a while"""
    breaker_rest: _Seconds = 10.0
    """length of the first such pause; doubled with each further failure, up to 5 minutes"""
    busy_rest: _Seconds = 0.5
    """length of the pause after an endpoint was busy and did not send ``Retry-After``"""
    webhook_secrets: Annotated[tuple[SecretStr, ...], *COMMAS] = ()
    """``whsec_…`` secrets; callbacks are signed with each of them, so set two during a rotation"""
    callback_ports: Annotated[tuple[int, ...], *COMMAS] = (443, 8443)
    callback_http: bool = False
    """allow callbacks to http:// URLs, which anyone on the network path can read and change"""
    callback_networks: Annotated[tuple[str, ...], *COMMAS] = ()
    """private networks to which callbacks may be sent; all other private addresses are refused"""
    callback_timeout: _Seconds = 20.0
    callback_attempts: int = Field(default=12, ge=1, le=1000)
    callbacks_at_once: int = Field(default=64, ge=1, le=10_000)
    callbacks_per_host: int = Field(default=4, ge=1, le=1000)

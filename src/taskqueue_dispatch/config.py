"""The dispatcher's settings: ``TASKQUEUE_DISPATCH_…``; lists have commas between."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from taskqueue_core.config import COMMAS

_Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


class DispatchSettings(BaseSettings):
    """Durations are seconds, sizes bytes."""

    model_config = SettingsConfigDict(
        env_prefix="TASKQUEUE_DISPATCH_", env_file=".env", extra="ignore", frozen=True
    )

    lease: _Seconds = 30.0
    """how long a slot stays held by a dispatcher that has gone silent; it is renewed three times as often"""
    safety_pass: _Seconds = 2.0
    """how often free slots are looked for without a ring of the bell"""
    health_interval: _Seconds = 10.0
    """how often servers are asked how they are"""
    settled: _Seconds = 5.0
    """how far apart two equal observations are that end a lease: longer than a server takes to count a job"""
    partition: _Seconds = 30.0
    """how long a server with a job may be out of reach before the job is taken for lost with it"""
    turn: _Seconds = 10.0
    """how long a model with jobs keeps a server that others wait for: see ``together`` of an endpoint"""
    drain: float = Field(default=10.0, ge=0, le=3600, allow_inf_nan=False)
    """how long a dispatcher that stops waits for what it has on servers"""
    find_timeout: _Seconds = 30.0
    """how long who asked for an endpoint may be queued"""
    endpoints_allowed: Annotated[tuple[str, ...], *COMMAS] = (
        "127.0.0.0/8", "::1/128", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7",
    )  # fmt: skip
    """networks, and hosts as ``gpu.example.com`` or ``*.example.com``, in which endpoints may be"""
    tls_ca: Path | None = None
    """authorities (PEM) that certificates of servers are verified by, instead of the system's"""
    answer_limit: int = Field(default=256 * 1024, ge=1024, le=256 * 1024)
    """what is read of a server's answer at most: a result may have no more"""
    breaker_failures: int = Field(default=5, ge=1, le=1000)
    """failures in a row of one endpoint after which it rests"""
    breaker_rest: _Seconds = 10.0
    """how long, at first; doubled with each further one, up to 5 minutes"""
    busy_rest: _Seconds = 0.5
    """how long an endpoint rests that was busy and did not say until when"""
    webhook_secrets: Annotated[tuple[SecretStr, ...], *COMMAS] = ()
    """``whsec_…`` secrets that callbacks are signed with, each of them: two during a rotation"""
    callback_ports: Annotated[tuple[int, ...], *COMMAS] = (443, 8443)
    callback_http: bool = False
    """callbacks to http:// too. Anybody on the way can read and change them"""
    callback_networks: Annotated[tuple[str, ...], *COMMAS] = ()
    """private networks in which receivers of callbacks may be all the same"""
    callback_timeout: _Seconds = 20.0
    callback_attempts: int = Field(default=12, ge=1, le=1000)
    callbacks_at_once: int = Field(default=64, ge=1, le=10_000)
    callbacks_per_host: int = Field(default=4, ge=1, le=1000)

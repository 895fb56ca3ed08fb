"""Settings of the Redis backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ImportString, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from taskqueue_core.errors import ConfigurationError
from taskqueue_redis.addresses import HostAddress, Kind, StoreAddress

_MINUTE = 60.0


class RedisSettings(BaseSettings):
    """Settings of the Redis backend, read from the environment variables ``TASKQUEUE_REDIS_…``."""

    model_config = SettingsConfigDict(
        env_prefix="TASKQUEUE_REDIS_", env_file=".env", extra="ignore"
    )

    url: SecretStr = SecretStr("redis://127.0.0.1:6379")
    """URL of the server, in one of the forms that `StoreAddress` parses; it may contain a password"""
    user: str = ""
    """ACL user; if empty, the user in the URL, or ``default`` if the URL names no user"""
    password: SecretStr | None = None
    """password of the user, unless the URL contains it"""
    password_file: Path | None = None
    """file with the password, read for each new connection, so that the password can be changed without a restart"""
    credential_provider: ImportString[Callable[[], Any]] | None = None
    """``module.name`` of a class or function that returns a ``CredentialProvider`` of redis-py"""
    address_remap: ImportString[Callable[[tuple[str, int]], tuple[str, int]]] | None = None
    """``module.name`` of a function that gets a ``(host, port)`` from Sentinels or nodes and returns a reachable one"""
    sentinel_user: str = ""
    """ACL user for the Sentinels; if empty, their ``default`` user"""
    sentinel_password: SecretStr | None = None
    """password of the Sentinels, if they require one"""
    tls_ca_file: Path | None = None
    """file with the CA certificates that are trusted; if unset, those that this machine trusts"""
    tls_cert_file: Path | None = None
    """file with the client's certificate (PEM), for servers that require one"""
    tls_key_file: Path | None = None
    """file with the private key for ``tls_cert_file``, for servers that require a client certificate"""
    dangerously_skip_tls_verification: bool = False
    """accept any server certificate; an attacker on the network can then read and change everything"""
    allow_plaintext: bool = False
    """allow a server on another machine to be used without TLS or without a password"""
    prefix: str = Field("tq", pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    """prefix of all keys and channels, after an opening brace: with ``tq``, they begin with ``{tq:``"""
    partitions: int | None = Field(None, ge=1, le=1024)
    """number of partitions over which the queues are spread, fixed at installation; if unset: 1, or 8 on a cluster"""
    connections: int = Field(16, ge=1, le=1000)
    """maximum number of connections per server that may wait for replicas; other commands share one more connection"""
    in_flight: int = Field(1000, ge=1, le=100_000)
    """maximum number of commands in progress per server; further commands wait"""
    connect_timeout: float = Field(2.0, gt=0, le=_MINUTE, allow_inf_nan=False)
    """maximum number of seconds for opening a connection, including TLS and login"""
    answer_timeout: float = Field(5.0, gt=0, le=_MINUTE, allow_inf_nan=False)
    """seconds without data after which a connection that waits for an answer is closed"""
    # The default allows two attempts of `answer_timeout` each, and is shorter than the default lease.
    operation_timeout: float = Field(10.0, gt=0, le=10 * _MINUTE, allow_inf_nan=False)
    """seconds after which a failing command is no longer retried"""
    journal_length: int | None = Field(None, ge=1000, le=1_000_000_000)
    """minimum number of state changes that the journal of a partition keeps

    The value is stored in Redis for all processes. If the setting is unset, the stored value applies, which is a
    million at first.
    """
    journal_digests: bool | None = None
    """whether each state change in the journal has a digest that depends on all changes of its partition before it

    ``taskqueue pipeline audit`` checks the digests. The value is stored in Redis for all processes. If the setting is
    unset, the stored value applies, which is false at first.
    """
    lease: float = Field(15.0, ge=1, le=3600, allow_inf_nan=False)
    """seconds without a heartbeat after which the deliveries of a consumer are given to other consumers"""
    housekeeping: float = Field(2.0, gt=0, le=60, allow_inf_nan=False)
    """usual number of seconds between maintenance runs; after a gap of over three times that, all leases begin again"""
    stale_consumers: float = Field(86_400.0, ge=60, allow_inf_nan=False)
    """seconds of inactivity after which an unregistered consumer without deliveries is deleted from a consumer group"""
    appendfsync: Literal["always", "everysec", "no"] | None = None
    """value of ``appendfsync`` in redis.conf, for a Redis whose ACL does not allow its configuration to be read"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        address = self.address  # raises ConfigurationError if the URL is invalid
        ways = (self.password, self.password_file, self.credential_provider)
        if bool(address.password) + sum(way is not None for way in ways) > 1:
            raise ConfigurationError(
                "TASKQUEUE_REDIS_PASSWORD: the password is set more than once; allowed: one of TASKQUEUE_REDIS_URL, "
                "TASKQUEUE_REDIS_PASSWORD, _PASSWORD_FILE and _CREDENTIAL_PROVIDER"
            )
        logs_in = self.has_password and self.credential_provider is None
        if (self.user_name and not logs_in) or (self.sentinel_user and not self.sentinel_password):
            raise ConfigurationError(
                "TASKQUEUE_REDIS_USER or TASKQUEUE_REDIS_SENTINEL_USER: a user is set without a password; allowed: "
                "a user with a password (TASKQUEUE_REDIS_PASSWORD, _PASSWORD_FILE or _SENTINEL_PASSWORD), "
                "or _CREDENTIAL_PROVIDER without TASKQUEUE_REDIS_USER"
            )
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            raise ConfigurationError(
                "TASKQUEUE_REDIS_TLS_CERT_FILE and TASKQUEUE_REDIS_TLS_KEY_FILE: only one is set; "
                "allowed: both or neither"
            )
        for name in ("tls_ca_file", "tls_cert_file", "tls_key_file"):
            if getattr(self, name) is not None and not address.tls:
                raise ConfigurationError(
                    f"TASKQUEUE_REDIS_{name.upper()} is allowed only if TASKQUEUE_REDIS_URL "
                    "begins with rediss://, rediss+sentinel:// or rediss+cluster://"
                )
        self.password_now()
        for position in address.hosts:
            self.refuse_exposed(position)
        return self

    @cached_property
    def address(self) -> StoreAddress:
        """The parsed URL. Raises `ConfigurationError`."""
        return StoreAddress.of(self.url.get_secret_value())

    @property
    def partitions_of(self) -> int:
        """The number of partitions: the setting ``partitions``, or its default for this kind of server."""
        return self.partitions or (8 if self.address.kind is Kind.CLUSTER else 1)

    @property
    def user_name(self) -> str:
        """The ACL user; empty for the default user."""
        return self.user or self.address.user

    @property
    def has_password(self) -> bool:
        """Whether this client logs in: with a password or a credential provider."""
        password = self.password.get_secret_value() if self.password else self.address.password
        return bool(password or self.password_file or self.credential_provider)

    def password_now(self) -> str:
        """Return the password; empty if none is set. A password file is read each time. Raises `ConfigurationError`."""
        if self.password_file is None:
            return self.password.get_secret_value() if self.password else self.address.password
        problem = "is empty"
        try:
            if password := self.password_file.read_text(encoding="utf-8-sig").rstrip("\r\n"):
                return password
        except (OSError, UnicodeDecodeError) as error:
            problem = f"cannot be read ({type(error).__name__})"
        raise ConfigurationError(
            f"TASKQUEUE_REDIS_PASSWORD_FILE: {problem}; allowed: a text file that contains only the password"
        )

    def refuse_exposed(self, address: HostAddress) -> None:
        """Raise `ConfigurationError` for an unprotected server on another machine, unless ``allow_plaintext`` is set.

        Protection means TLS together with a password or a client certificate.
        """
        proves = self.has_password or self.tls_cert_file is not None
        if self.allow_plaintext or address.loopback or (self.address.tls and proves):
            return
        missing = "a password" if self.address.tls else "TLS" if proves else "TLS and a password"
        raise ConfigurationError(
            f"TASKQUEUE_REDIS_URL: {address} is another machine, and {missing} is missing; allowed: rediss:// with a "
            "password, or a trusted network with TASKQUEUE_REDIS_ALLOW_PLAINTEXT=true"
        )

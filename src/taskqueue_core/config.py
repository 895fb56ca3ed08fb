"""Settings from environment variables (``TASKQUEUE_…``), a ``.env`` file, ``taskqueue.toml`` and secret files.

An earlier source takes precedence over a later one. Secret files are in the directory that ``TASKQUEUE_SECRETS_DIR``
names. In the environment, the items of a list are separated by commas; in TOML, a list is an array.

Each backend has settings of its own, such as ``TASKQUEUE_MEMORY_…``, which ``taskqueue.toml`` cannot contain. During a
migration, the old backend reads its settings with another prefix, ``TASKQUEUE_OLD_MEMORY_…``, because both backends may
be of the same kind; see `of_the_old_side`.
"""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from importlib.metadata import entry_points
from pathlib import Path
from tomllib import TOMLDecodeError
from typing import Annotated, Literal, TypeVar

from pydantic import BeforeValidator, Field, SecretStr, ValidationError
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from taskqueue_core.errors import ConfigurationError

S = TypeVar("S", bound=BaseSettings)
_log = logging.getLogger("taskqueue")

SECRETS_DIR = "TASKQUEUE_SECRETS_DIR"
"""variable with the path of a directory of secret files, each named like the environment variable of its setting"""
_PREFIX = "TASKQUEUE_"
_OLD_PREFIX = "TASKQUEUE_OLD_"
SETTINGS_GROUP = "taskqueue.settings"
"""group of entry points that name the settings classes of installed packages"""
_SIMILAR = 0.8
_reported: set[str] = set()
_old_side: ContextVar[bool] = ContextVar("taskqueue_old_side", default=False)


def _split(value: object) -> object:
    if isinstance(value, str):
        return [name for part in value.split(",") if (name := part.strip())]
    return value


def _lower(value: object) -> object:
    return [str(name).lower() for name in value] if isinstance(value, list) else value


def _network(value: object) -> str:
    try:
        return str(ipaddress.ip_network(str(value), strict=False))
    except ValueError:
        raise ValueError("must be IP addresses or networks, such as 10.0.0.0/8") from None


Network = Annotated[str, BeforeValidator(_network)]
"""annotation for a setting that is an IP address or a network"""
COMMAS = (NoDecode, BeforeValidator(_split))
"""annotation for a setting that is a list, whose items are separated by commas in the environment"""
_CommaLower = (NoDecode, BeforeValidator(_lower), BeforeValidator(_split))


class Settings(BaseSettings):
    """The settings of applications, workers and the server."""

    model_config = SettingsConfigDict(
        env_prefix="TASKQUEUE_", env_file=".env", toml_file="taskqueue.toml", extra="ignore"
    )

    backend: str = "memory"
    """the backend: the name of an entry point, a module path, or ``module:attr``"""
    migrate_from: str | None = None
    """the old backend during a migration, specified like ``backend``; its own settings start with ``TASKQUEUE_OLD_``"""
    migrate_mode: Literal["available", "strict"] = "available"
    """while both backends have tasks: ``available`` gives priority to availability, ``strict`` to order and limits"""
    sharding: bool = False
    """whether queues may have shards; must be the same for every server, worker and publisher that uses the store"""
    server_url: str = "http://127.0.0.1:8420"
    """URL of the server, for workers, the backend ``server`` and the command line"""
    token: SecretStr | None = None
    """token that clients use to authenticate to the server"""
    tls_ca: Path | None = None
    """file with the certificates (PEM) of the authorities that clients trust, instead of the system's authorities"""
    host: str = "127.0.0.1"
    """address on which the server listens; must be a loopback address unless clients authenticate"""
    port: int = Field(8420, ge=0, le=65_535)
    """port on which the server listens; 0 chooses a free port"""
    tokens_file: Path | None = None
    """file with the clients' tokens; without this file or an authentication plugin, any local client may connect"""
    server_ticket_key_file: Path | None = None
    """file with at least 32 random bytes, with which servers sign tickets; by default each process has its own key"""
    tls_certificate: Path | None = None
    """file with the server's certificate chain (PEM); if it is set, the server accepts only https and wss"""
    tls_key: Path | None = None
    """file with the certificate's private key (PEM), unless the certificate file contains the key"""
    allowed_hosts: Annotated[frozenset[str], *_CommaLower] = frozenset()
    """if clients authenticate: allowed values of the header ``Host``, with or without a port; empty allows any value"""
    origins: Annotated[frozenset[str], *_CommaLower] = frozenset()
    """other origins whose web pages may use the server, for example ``https://queue.example``"""
    prometheus: str | None = Field(None, pattern=r"^https?://[^\s?#]{1,500}$")
    """base URL of a Prometheus server, to which the charts of the dashboard link for ranges over a day"""
    trusted_proxies: Annotated[frozenset[Network], *COMMAS] = frozenset()
    """addresses or networks of reverse proxies whose ``X-Forwarded-For`` and ``X-Forwarded-Proto`` are believed"""
    unauthenticated_connections: int = Field(512, ge=1, le=10_000)
    """maximum number of connections of one server process whose clients have not authenticated"""
    unauthenticated_per_address: int = Field(128, ge=1, le=10_000)
    """maximum number of these connections from one address, or from one IPv6 network of 64 bits"""
    processes: int = Field(1, ge=1, le=64)
    """number of server processes that share the port; more than one needs a store that processes can share"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """lowest level of the messages that the server and workers log to stderr"""
    log_format: Literal["auto", "text", "json"] = "auto"
    """``text``: key-value pairs; ``json``: an object per line; ``auto``: short lines on a terminal, else ``text``"""
    log_errors: Literal["full", "frames"] = "full"
    """how a worker logs a failed attempt: ``full``: with its traceback; ``frames``: the same without texts of errors"""
    lease: float = Field(15.0, gt=0, le=3600, allow_inf_nan=False)
    """seconds without a message from a worker after which the server closes the worker's socket"""
    grace: float = Field(0.5, ge=0, le=60, allow_inf_nan=False)
    """seconds within which a worker whose socket breaks can reconnect and keep its deliveries"""
    drain: float = Field(5.0, ge=0, le=3600, allow_inf_nan=False)
    """seconds for which the server, at shutdown, waits for workers to settle their deliveries"""
    prefect_version: str = Field("3.9.1", pattern=r"^[0-9]{1,4}(\.[0-9A-Za-z.+]{1,32})?$")
    """version of Prefect that the server reports to Prefect's task workers"""
    extensions: Annotated[frozenset[str], *COMMAS] = frozenset()
    """names of the extensions that the server loads, for example ``dispatch``"""
    plugins_allow: Annotated[frozenset[str] | None, *COMMAS] = None
    """names of the plugins that may be loaded; ``None`` allows all installed plugins"""
    plugins_deny: Annotated[frozenset[str], *COMMAS] = frozenset()
    """names of the plugins that may not be loaded"""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources of settings in order of precedence: the TOML file comes after ``.env``."""
        return (
            init_settings,
            env_settings,
            dotenv_settings,
            TomlConfigSettingsSource(settings_cls),
            file_secret_settings,
        )


def load_settings(kind: type[S]) -> S:
    """Read the settings of the class ``kind``. Raises `ConfigurationError`, which names settings but no values."""
    prefix = kind.model_config.get("env_prefix", "")
    if _old_side.get():
        prefix = _OLD_PREFIX + prefix.removeprefix(_PREFIX)
    _warn_of_misspelt_variables()
    folder = os.environ.get(SECRETS_DIR) or None
    if folder is not None and not os.path.isdir(folder):  # noqa: PTH112 - Path.is_dir raises OSError for some texts
        raise ConfigurationError(f"{SECRETS_DIR}: must be the path of a directory")
    try:
        return kind(_env_prefix=prefix, _secrets_dir=folder)
    except ConfigurationError as error:
        # The frames of pydantic have local variables with secrets, which some tools show in tracebacks.
        raise error.with_traceback(None) from None
    except ValidationError as error:
        faults = "; ".join(
            f"{prefix}{'_'.join(str(part) for part in fault['loc'])}".upper() + f": {fault['msg']}"
            for fault in error.errors(include_input=False, include_url=False)
        )
        raise ConfigurationError(f"invalid settings: {faults}") from None
    except (SettingsError, TOMLDecodeError) as error:
        raise ConfigurationError(f"cannot read the settings: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"cannot read the settings: {type(error).__name__} in .env, taskqueue.toml or a secret file"
        ) from None


def variables_of(kind: type[BaseSettings]) -> set[str]:
    """Return the names of the environment variables of a class of settings."""
    prefix = kind.model_config.get("env_prefix", "")
    return {f"{prefix}{name}".upper() for name in kind.model_fields}


def _warn_of_misspelt_variables() -> None:
    """Log a warning, once per process, for each unknown variable whose name is similar to that of a known one.

    Other unknown variables may belong to a package that does not declare its settings. Values are not logged.
    """
    own = variables_of(Settings)
    known = own | {SECRETS_DIR}
    names = {name for name in os.environ if name.startswith(_PREFIX)} - known - _reported
    points = entry_points(group=SETTINGS_GROUP) if names else ()
    # Import the classes with a prefix that occurs first: the process needs them anyway.
    for point in sorted(points, key=lambda point: not any(point.name.upper() in n for n in names)):
        if not names - known:
            return
        try:
            known |= variables_of(point.load())
        except Exception:  # noqa: BLE001, S112 - a broken package must not stop a process that does not use it
            continue
        known |= {_OLD_PREFIX + name.removeprefix(_PREFIX) for name in known}
    for name in sorted(names - known):
        ending = [each for each in sorted(own) if each.endswith(f"_{name.removeprefix(_PREFIX)}")]
        if match := ending or get_close_matches(name, sorted(known), n=1, cutoff=_SIMILAR):
            _reported.add(name)
            _log.warning(
                "%s is not a setting and has no effect; did you mean %s?", name[:100], match[0]
            )


@contextmanager
def of_the_old_side() -> Iterator[None]:
    """Make `load_settings` use the prefix ``TASKQUEUE_OLD_``, to read the settings of a migration's old backend."""
    token = _old_side.set(True)
    try:
        yield
    finally:
        _old_side.reset(token)

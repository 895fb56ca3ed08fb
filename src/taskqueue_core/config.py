"""Settings, from the environment (``TASKQUEUE_…``), a ``.env`` file and ``taskqueue.toml``, in this order.

Lists of names are separated by commas in the environment and are arrays in TOML. A backend reads settings of its own,
in the environment and ``.env`` (``TASKQUEUE_MEMORY_…``). So that there may be two of a kind, the one that a migration
leaves reads them under another name (``TASKQUEUE_OLD_MEMORY_…``): `of_the_old_side`. What is in none of these may be a
file in the directory that ``TASKQUEUE_SECRETS_DIR`` names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
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

SECRETS_DIR = "TASKQUEUE_SECRETS_DIR"
"""names a directory with files that are named as settings, such as ``taskqueue_token``; the environment goes before"""
_PREFIX = "TASKQUEUE_"
_OLD_PREFIX = "TASKQUEUE_OLD_"
_old_side: ContextVar[bool] = ContextVar("taskqueue_old_side", default=False)


def _split(value: object) -> object:
    if isinstance(value, str):
        return [name for part in value.split(",") if (name := part.strip())]
    return value


def _lower(value: object) -> object:
    return [str(name).lower() for name in value] if isinstance(value, list) else value


COMMAS = (NoDecode, BeforeValidator(_split))
"""annotation of a list that is separated by commas in the environment"""
_CommaLower = (NoDecode, BeforeValidator(_lower), BeforeValidator(_split))


class Settings(BaseSettings):
    """The settings of the core and the server."""

    model_config = SettingsConfigDict(
        env_prefix="TASKQUEUE_", env_file=".env", toml_file="taskqueue.toml", extra="ignore"
    )

    backend: str = "memory"
    """an entry-point name, a module path, or ``module:attr``"""
    migrate_from: str | None = None
    """the backend that tasks move away from, named like ``backend``; its own settings are ``TASKQUEUE_OLD_…``"""
    migrate_mode: Literal["available", "strict"] = "available"
    """what comes first while both have tasks: that they flow, or that order and limits hold"""
    sharding: bool = False
    """whether queues may be spread over shards; set it in every server, worker and publisher of a store"""
    server_url: str = "http://127.0.0.1:8420"
    """where the server is: for workers, the ``server`` backend and the command line"""
    token: SecretStr | None = None
    """what clients show to the server"""
    tls_ca: Path | None = None
    """certificates (PEM) of the authorities that clients trust instead of the system's"""
    host: str = "127.0.0.1"
    """where the server listens; loopback only, unless it authenticates"""
    port: int = Field(8420, ge=0, le=65_535)
    """0 takes a free port"""
    tokens_file: Path | None = None
    """tokens of the permitted clients; without it and without an authenticating plugin, all local clients are"""
    tls_certificate: Path | None = None
    """the server's certificate chain (PEM); with it the server speaks https and wss alone"""
    tls_key: Path | None = None
    """its key (PEM), where that is not in the same file"""
    allowed_hosts: Annotated[frozenset[str], *_CommaLower] = frozenset()
    """names that the server answers to (``Host``), with or without a port; empty: all, if it authenticates"""
    origins: Annotated[frozenset[str], *_CommaLower] = frozenset()
    """origins whose pages may use the server, besides its own, such as ``https://queue.example``"""
    processes: int = Field(1, ge=1, le=64)
    """how many server processes share the port; more than one needs a store that they can share"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """from where on ``taskqueue serve`` logs, on stderr"""
    log_format: Literal["auto", "text", "json"] = "auto"
    """how: few words on a terminal and pairs elsewhere, or always pairs, or an object per line"""
    lease: float = Field(15.0, gt=0, le=3600, allow_inf_nan=False)
    """seconds of silence after which a worker's socket is given up"""
    grace: float = Field(0.5, ge=0, le=60, allow_inf_nan=False)
    """seconds a broken socket's deliveries wait for the worker to come back"""
    drain: float = Field(5.0, ge=0, le=3600, allow_inf_nan=False)
    """seconds the server waits at its end for workers to settle what they run"""
    prefect_version: str = Field("3.9.1", pattern=r"^[0-9]{1,4}(\.[0-9A-Za-z.+]{1,32})?$")
    """the version of Prefect that the server gives to task workers which ask for one"""
    extensions: Annotated[frozenset[str], *COMMAS] = frozenset()
    """what other packages bring into the server, such as ``dispatch``"""
    plugins_allow: Annotated[frozenset[str] | None, *COMMAS] = None
    """names of the plugins that may be loaded; unset allows all that are installed"""
    plugins_deny: Annotated[frozenset[str], *COMMAS] = frozenset()
    """names of the plugins that may not"""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read the TOML file too; environment variables take precedence over it."""
        return (
            init_settings,
            env_settings,
            dotenv_settings,
            TomlConfigSettingsSource(settings_cls),
            file_secret_settings,
        )


def load_settings(kind: type[S]) -> S:
    """Read settings of a kind. Raise `ConfigurationError` that names each bad one, without showing its value."""
    prefix = kind.model_config.get("env_prefix", "")
    if _old_side.get():
        prefix = _OLD_PREFIX + prefix.removeprefix(_PREFIX)
    folder = os.environ.get(SECRETS_DIR) or None
    if folder is not None and not os.path.isdir(folder):  # noqa: PTH112 - any text may stand there
        raise ConfigurationError(f"{SECRETS_DIR}: the directory does not exist")
    try:
        return kind(_env_prefix=prefix, _secrets_dir=folder)
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
            f"cannot read the settings: {type(error).__name__} in .env or taskqueue.toml"
        ) from None


@contextmanager
def of_the_old_side() -> Iterator[None]:
    """Let `load_settings` read only ``TASKQUEUE_OLD_…``: the settings of the backend that a migration leaves."""
    token = _old_side.set(True)
    try:
        yield
    finally:
        _old_side.reset(token)

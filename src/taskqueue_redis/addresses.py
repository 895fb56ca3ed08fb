"""Addresses of Redis servers, parsed from a URL."""

from __future__ import annotations

import ipaddress
import os
import re
from enum import Enum
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

import msgspec

from taskqueue_core.errors import ConfigurationError

_PORT = 6379
_SENTINEL_PORT = 26379
_PORTS = range(1, 65_536)
_DATABASE = re.compile(r"[0-9]{1,10}")
_NUMBERS = range(2**31)
_NAME = re.compile(r"[!-~]+")
_PATH_BYTES = 107
"""maximum length of a socket's path on Linux"""
_SERVICE = re.compile(r"[A-Za-z0-9._-]{1,200}")
_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,255}")
_OPTIONS = {
    "db", "client_name", "protocol", "health_check_interval",
    "ssl_password", "ssl_ciphers", "ssl_include_verify_flags", "ssl_exclude_verify_flags",
}  # fmt: skip
"""options of redis-py that a URL may contain; the others have a setting, or would weaken the checks"""
_FORMS = (
    "redis://[user:password@]host[:port][/database], rediss:// for TLS, unix:///path/to/socket, "
    "redis+sentinel://host:port,host:port/service[/database], redis+cluster://host:port,host:port"
)


class Kind(Enum):
    """The deployment of the servers behind an address."""

    SINGLE = "single"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


_SCHEMES = {
    "unix": (Kind.SINGLE, False),
    "redis": (Kind.SINGLE, False),
    "rediss": (Kind.SINGLE, True),
    "redis+sentinel": (Kind.SENTINEL, False),
    "rediss+sentinel": (Kind.SENTINEL, True),
    "redis+cluster": (Kind.CLUSTER, False),
    "rediss+cluster": (Kind.CLUSTER, True),
}


class HostAddress(msgspec.Struct, frozen=True):
    """One server: a host and port, or the path of a socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def loopback(self) -> bool:
        """Whether the server is certainly on this machine."""
        return bool(self.path) or is_loopback(self.host)

    def __str__(self) -> str:
        if self.path:
            return self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class StoreAddress(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed URL. Its ``repr`` and ``shown`` contain no secret."""

    kind: Kind
    tls: bool
    hosts: tuple[HostAddress, ...]
    """the server itself, or some of the Sentinels or cluster nodes"""
    service: str = ""
    """the name under which Sentinels know the master; empty without Sentinels"""
    database: int = 0
    user: str = ""
    password: str = ""
    scheme: str = "redis"
    options: dict[str, Any] = {}
    """arguments for the connections of redis-py"""

    @property
    def shown(self) -> str:
        """The URL without user and password, for logs, errors and health."""
        rest = f"/{self.service}" if self.service else ""
        rest += f"/{self.database}" if self.database else ""
        return f"{self.scheme}://{','.join(map(str, self.hosts))}{rest}"

    def __repr__(self) -> str:
        return f"Address({self.shown!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("shown", self.shown)]

    @classmethod
    def of(cls, url: str, setting: str = "TASKQUEUE_REDIS_URL") -> Self:
        """Parse a URL. Raises `ConfigurationError`, which names the setting and the allowed forms, never the value."""
        try:
            return cls(**_parse(url.strip()))
        except _RefusedUrl as refusal:
            got, allowed = refusal.args
        except ValueError:
            got, allowed = "an invalid URL, host or port", _FORMS
        raise ConfigurationError(f"{setting}: got {got}; allowed: {allowed}")


class _RefusedUrl(Exception):
    """A URL is not supported. The arguments: a description of the URL, and the allowed forms."""


def is_loopback(host: str) -> bool:
    """Return whether a host is certainly this machine: a loopback address, or the name ``localhost``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _parse(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    if parts.scheme not in _SCHEMES:
        raise _RefusedUrl(
            "a URL with an unknown scheme" if parts.scheme else "text without a scheme", _FORMS
        )
    kind, tls = _SCHEMES[parts.scheme]
    login, _, hosts = parts.netloc.rpartition("@")
    user, _, password = login.partition(":")
    options = _parse_options(parts.query, parts.fragment, tls=tls)
    databases = [str(options.pop("db"))] if "db" in options else []
    service = ""
    if parts.scheme == "unix":
        path = unquote(parts.path)
        if hosts or path in {"", "/"} or "\0" in path or len(os.fsencode(path)) > _PATH_BYTES:
            raise _RefusedUrl(
                "a unix URL without a valid path",
                f"unix:///path/to/socket, with an absolute path of at most {_PATH_BYTES} bytes",
            )
        addresses = [HostAddress(path=path)]
    else:
        port = _SENTINEL_PORT if kind is Kind.SENTINEL else _PORT
        addresses = [_parse_host(host, port) for host in hosts.split(",")]
        names = [unquote(name) for name in parts.path.split("/") if name]
        if kind is Kind.SENTINEL:
            service = names.pop(0) if names else ""
            if not _SERVICE.fullmatch(service):
                allowed = "redis+sentinel://host:port,host:port/service (the name of the master)"
                raise _RefusedUrl("a Sentinel URL without a service name", allowed)
        databases = names + databases
    if kind is Kind.SINGLE and len(addresses) > 1:
        raise _RefusedUrl(
            "several hosts", "one host, or several with redis+sentinel:// or redis+cluster://"
        )
    return {
        "kind": kind, "tls": tls, "hosts": tuple(addresses), "service": service,
        "database": _parse_database(databases, kind),
        "user": unquote(user), "password": unquote(password), "scheme": parts.scheme, "options": options,
    }  # fmt: skip


def _parse_options(query: str, fragment: str, *, tls: bool) -> dict[str, Any]:
    if not query and not fragment:
        return {}
    from redis.asyncio.connection import parse_url  # noqa: PLC0415 - the import of redis-py is slow

    allowed = f"{', '.join(sorted(_OPTIONS))} of redis-py; set TASKQUEUE_REDIS_… variables instead of others"
    given = parse_qs(query, keep_blank_values=True)
    if fragment or not given.keys() <= _OPTIONS:
        raise _RefusedUrl("a URL with a fragment or an unknown option", allowed)
    options: dict[str, Any] = {}
    for name, values in given.items():
        if len(values) > 1:
            raise _RefusedUrl(f"the option {name} more than once", "each option once")
        if name.startswith("ssl_") and not tls:
            raise _RefusedUrl(f"the option {name} without TLS", "ssl_… with a rediss URL")
        try:
            options |= parse_url(f"redis://?{urlencode({name: values[0]})}")
        except ValueError:
            raise _RefusedUrl(f"an invalid value of the option {name}", allowed) from None
    if options.get("protocol", 2) not in {2, 3}:
        raise _RefusedUrl("an invalid value of the option protocol", "2 or 3")
    if options.get("health_check_interval", 0) not in _NUMBERS:
        least = "seconds, or 0 for no checks"
        raise _RefusedUrl("an invalid value of the option health_check_interval", least)
    if not _NAME.fullmatch(options.get("client_name", "taskqueue")):
        visible = "visible ASCII characters without spaces"
        raise _RefusedUrl("an invalid value of the option client_name", visible)
    return options


def _parse_host(text: str, default_port: int) -> HostAddress:
    split = urlsplit(f"//{text}")
    host, port = split.hostname or "", default_port if split.port is None else split.port
    if not _HOST.fullmatch(host):
        raise _RefusedUrl("a URL without a valid host", _FORMS)
    if port not in _PORTS:
        raise _RefusedUrl("a port out of range", "ports 1 to 65535")
    return HostAddress(host, port)


def _parse_database(given: list[str], kind: Kind) -> int:
    """Return the database, ``given`` by the path and the option ``db`` together."""
    if given and kind is Kind.CLUSTER:
        raise _RefusedUrl("a cluster URL with a path or db", "neither, as it has one database")
    number = given[0] if given else "0"
    if len(given) > 1 or not _DATABASE.fullmatch(number) or int(number) not in _NUMBERS:
        allowed = f"a whole number from 0 to {_NUMBERS[-1]}, in the path or as db"
        raise _RefusedUrl("an invalid database in the path or db", allowed)
    return int(number)

"""Addresses of Redis servers, parsed from a URL."""

from __future__ import annotations

import ipaddress
import re
from enum import Enum
from typing import Self
from urllib.parse import unquote, urlsplit

import msgspec

from taskqueue_core.errors import ConfigurationError

_PORT = 6379
_SENTINEL_PORT = 26379
_PORTS = range(1, 65_536)
_DATABASE = re.compile(r"[0-9]{1,5}")
_SERVICE = re.compile(r"[A-Za-z0-9._-]{1,200}")
_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,255}")
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

    @property
    def shown(self) -> str:
        """The URL without user and password, for logs, errors and health."""
        rest = f"/{self.service}" if self.service else ""
        rest += f"/{self.database}" if self.database else ""
        return f"{self.scheme}://{','.join(map(str, self.hosts))}{rest}"

    def __repr__(self) -> str:
        return f"Address({self.shown!r})"

    @classmethod
    def of(cls, url: str, setting: str = "TASKQUEUE_REDIS_URL") -> Self:
        """Parse a URL. Raises `ConfigurationError`, which names the setting and the allowed forms, never the value."""
        try:
            parts = urlsplit(url.strip())
        except ValueError:
            raise _refusal(setting, "text that is not a URL", _FORMS) from None
        if parts.query or parts.fragment:
            allowed = "a URL without a query; set TASKQUEUE_REDIS_… variables instead"
            raise _refusal(setting, "a URL with a query or fragment", allowed)
        login, _, hosts = parts.netloc.rpartition("@")
        user, _, password = login.partition(":")
        if parts.scheme not in _SCHEMES:
            got = "a URL with an unknown scheme" if parts.scheme else "text without a scheme"
            raise _refusal(setting, got, _FORMS)
        kind, tls = _SCHEMES[parts.scheme]
        if parts.scheme != "unix":
            addresses = _parse_hosts(setting, hosts, kind)
            service, database = _path(setting, parts.path, kind)
        elif hosts or parts.path in {"", "/"}:
            raise _refusal(setting, "a unix URL without an absolute path", "unix:///path/to/socket")
        else:
            addresses, service, database = (HostAddress(path=unquote(parts.path)),), "", 0
        return cls(
            kind=kind,
            tls=tls,
            hosts=addresses,
            service=service,
            database=database,
            user=unquote(user),
            password=unquote(password),
            scheme=parts.scheme,
        )


def is_loopback(host: str) -> bool:
    """Return whether a host is certainly this machine: a loopback address, or the name ``localhost``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _refusal(setting: str, got: str, allowed: str) -> ConfigurationError:
    return ConfigurationError(f"{setting}: got {got}; allowed: {allowed}")


def _parse_hosts(setting: str, hosts: str, kind: Kind) -> tuple[HostAddress, ...]:
    port = _SENTINEL_PORT if kind is Kind.SENTINEL else _PORT
    addresses = tuple(_parse_host(setting, host, port) for host in hosts.split(","))
    if kind is Kind.SINGLE and len(addresses) > 1:
        allowed = "one host, or several with redis+sentinel:// or redis+cluster://"
        raise _refusal(setting, "several hosts", allowed)
    return addresses


def _parse_host(setting: str, text: str, default_port: int) -> HostAddress:
    try:
        split = urlsplit(f"//{text}")
        host, port = split.hostname or "", split.port
    except ValueError:
        raise _refusal(setting, "an invalid host or port", _FORMS) from None
    if not _HOST.fullmatch(host):
        raise _refusal(setting, "a URL without a valid host", _FORMS)
    port = default_port if port is None else port
    if port not in _PORTS:
        raise _refusal(setting, "a port out of range", "ports 1 to 65535")
    return HostAddress(host, port)


def _path(setting: str, path: str, kind: Kind) -> tuple[str, int]:
    names = [unquote(name) for name in path.split("/") if name]
    service = ""
    if kind is Kind.SENTINEL:
        if not names or not _SERVICE.fullmatch(names[0]):
            allowed = "redis+sentinel://host:port,host:port/service (the name of the master)"
            raise _refusal(setting, "a Sentinel URL without a service name", allowed)
        service = names.pop(0)
    if not names:
        return service, 0
    if kind is Kind.CLUSTER:
        raise _refusal(
            setting, "a cluster URL with a path", "no path, as a cluster has one database"
        )
    if len(names) > 1 or not _DATABASE.fullmatch(names[0]):
        raise _refusal(setting, "an invalid database in the path", "a whole number from 0 to 99999")
    return service, int(names[0])

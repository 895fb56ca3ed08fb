"""Listening sockets of the server, and its URL."""

from __future__ import annotations

import os
import socket
import sys

from taskqueue_core.config import Settings
from taskqueue_core.errors import ConfigurationError

_SPREADS = sys.platform == "linux"
"""whether the kernel balances connections over several sockets on one port; otherwise only the last socket gets any"""


def listen(settings: Settings) -> socket.socket:
    """Return a socket that listens at the configured address. Raises `ConfigurationError` if that is impossible."""
    host, family = _address_of(settings.host)
    try:
        return _quick(socket.create_server((host, settings.port), family=family, backlog=2048))
    except OSError as error:
        raise _cannot(settings, error) from error


class Port:
    """One port for several processes, reserved while this object is open.

    On Linux each process has its own socket, and the kernel spreads new connections over the sockets by the client's
    address and port. When many workers reconnect at once and stay connected for days, they are spread evenly; with one
    shared socket the first process to wake could accept them all. A new process gets connections as soon as it listens,
    and a process that has died gets no more. On other systems all processes share one socket.
    """

    def __init__(self, settings: Settings) -> None:
        """Reserve the port. Raises `ConfigurationError` if that fails, for example because another server uses it."""
        listen(settings).close() if settings.port else None
        self._host, self._family = _address_of(settings.host)
        self._shared: socket.socket | None = None
        try:
            if _SPREADS:
                # This socket reserves the port. It does not listen, so it gets no connections.
                self._holder = self._bound(settings.port)
            else:
                self._holder = self._shared = listen(settings)
        except OSError as error:
            raise _cannot(settings, error) from error
        self.url = url_of(self._holder, secure=settings.tls_certificate is not None)
        self._number = self._holder.getsockname()[1]

    def share(self) -> socket.socket:
        """Return a socket for one process; the caller closes it after passing it on."""
        return self._bound(self._number) if self._shared is None else self._shared.dup()

    def close(self) -> None:
        """Release the port."""
        self._holder.close()

    def _bound(self, number: int) -> socket.socket:
        bound = socket.socket(self._family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if self._family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound.bind((self._host, number))
        except BaseException:
            bound.close()
            raise
        return _quick(bound)


def url_of(listener: socket.socket, *, secure: bool = False) -> str:
    """Return the URL of a bound socket."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if secure else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _address_of(host: str) -> tuple[str, socket.AddressFamily]:
    host = "127.0.0.1" if host == "localhost" else host
    return host, socket.AF_INET6 if ":" in host else socket.AF_INET


def _quick(bound: socket.socket) -> socket.socket:
    # asyncio sets TCP_NODELAY only on sockets that it created. Without it, small responses can take 40 ms longer.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return bound


def _cannot(settings: Settings, error: OSError) -> ConfigurationError:
    # With an errno, str(error) would repeat the address.
    reason = os.strerror(error.errno) if error.errno else str(error)
    host, _ = _address_of(settings.host)
    return ConfigurationError(
        f"cannot listen on port {settings.port} of {host}: {reason}; "
        "check TASKQUEUE_HOST, or set TASKQUEUE_PORT to another port, or to 0 for any free port"
    )

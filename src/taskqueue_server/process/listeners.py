"""The sockets that a server listens on, and the address that it tells."""

from __future__ import annotations

import os
import socket
import sys

from taskqueue_core.config import Settings
from taskqueue_core.errors import ConfigurationError

_SPREADS = sys.platform == "linux"
"""whether the kernel spreads connections over the sockets of one port; elsewhere the last of them gets all"""


def listen(settings: Settings) -> socket.socket:
    """Listen where the settings say. Raises `ConfigurationError` where that is not possible."""
    host, family = _address_of(settings.host)
    try:
        return _quick(socket.create_server((host, settings.port), family=family, backlog=2048))
    except OSError as error:
        raise _cannot(settings, error) from error


class Port:
    """One port for several processes, held as long as this is open, though nobody may listen at a time.

    On Linux each process has a socket of its own, over which the kernel spreads new connections by their
    addresses: a burst of workers that come back at once, to stay for days, is divided evenly, where of one
    shared socket the first process to wake would take them all. A process that starts gets connections from the
    moment it listens, and one that has died gets no more. Elsewhere all share one socket.
    """

    def __init__(self, settings: Settings) -> None:
        """Raises `ConfigurationError` where the port cannot be had, also if another server shares it among its own."""
        listen(settings).close() if settings.port else None
        self._host, self._family = _address_of(settings.host)
        self._shared: socket.socket | None = None
        try:
            if _SPREADS:
                # bound only, so it is given no connection
                self._holder = self._bound(settings.port)
            else:
                self._holder = self._shared = listen(settings)
        except OSError as error:
            raise _cannot(settings, error) from error
        self.url = url_of(self._holder, secure=settings.tls_certificate is not None)
        self._number = self._holder.getsockname()[1]

    def share(self) -> socket.socket:
        """Return a socket for one process; close it here once that has it."""
        return self._bound(self._number) if self._shared is None else self._shared.dup()

    def close(self) -> None:
        """Let go of the port."""
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
    """Return the address of a bound socket."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if secure else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _address_of(host: str) -> tuple[str, socket.AddressFamily]:
    host = "127.0.0.1" if host == "localhost" else host
    return host, socket.AF_INET6 if ":" in host else socket.AF_INET


def _quick(bound: socket.socket) -> socket.socket:
    # asyncio does this only for sockets that it made itself; without it small answers wait for 40 ms.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return bound


def _cannot(settings: Settings, error: OSError) -> ConfigurationError:
    # The library's own text repeats the address.
    reason = os.strerror(error.errno) if error.errno else str(error)
    host, _ = _address_of(settings.host)
    return ConfigurationError(
        f"cannot listen on port {settings.port} of {host}: {reason}; "
        "set TASKQUEUE_PORT to another one, or to 0 for any"
    )

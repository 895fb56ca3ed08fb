"""Signal handlers, and reloading of settings on SIGHUP (``systemctl reload``) while the server runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from taskqueue_core.config import Settings, load_settings
from taskqueue_core.errors import ConfigurationError
from taskqueue_core.logs import set_level
from taskqueue_server.auth.tls import server_context
from taskqueue_server.context.server import ServerContext
from taskqueue_server.process import systemd

LIVE = frozenset({"allowed_hosts", "drain", "grace", "log_level", "origins"})
"""names of settings that apply at once after a reload; all others need a restart"""
_STDIN = 0
_log = logging.getLogger("taskqueue.server")

Reread = Callable[[], Settings]
"""a function that reads the settings again, or raises `ConfigurationError`"""


def rereader(given: Mapping[str, Any]) -> Reread:
    """Return a function that reads the settings again. Settings in ``given`` override the environment and files."""
    return lambda: load_settings(Settings).model_copy(update=dict(given))


def reload_settings(current: Settings, read: Reread) -> Settings | None:
    """Return ``current`` with the new values of the settings in `LIVE`; ``None`` if the new settings are invalid.

    Logs the names of the changed settings, or the error if the settings are invalid, but never a value.
    """
    try:
        new = read()
    except ConfigurationError as error:
        _log.error("reload failed, current settings stay in force", extra={"reason": str(error)})
        return None
    changed = [n for n in Settings.model_fields if getattr(current, n) != getattr(new, n)]
    if need_restart := [name for name in changed if name not in LIVE]:
        _log.warning("changed settings need a restart", extra={"settings": " ".join(need_restart)})
    live = {name: getattr(new, name) for name in changed if name in LIVE}
    _log.info("settings reloaded", extra={"settings": " ".join(live) or "unchanged"})
    return current.model_copy(update=live)


def adopt(context: ServerContext, settings: Settings, tls: ssl.SSLContext | None = None) -> None:
    """Apply the result of `reload_settings` to a running server, and reload the server's tokens and certificate.

    If the new certificate is invalid, the error is logged and the current certificate stays in force. An open
    connection ends only if its token no longer grants the rights that it needs.
    """
    context.settings = settings
    context.access.ask_to_reload()
    set_level(settings.log_level)
    if tls is not None and settings.tls_certificate is not None:
        try:
            server_context(settings)
            tls.load_cert_chain(settings.tls_certificate, settings.tls_key)
        except (ConfigurationError, OSError) as error:
            reason = str(error) if isinstance(error, ConfigurationError) else type(error).__name__
            _log.error(
                "certificate not reloaded, the current one stays in force", extra={"reason": reason}
            )


def reload(context: ServerContext, read: Reread, tls: ssl.SSLContext | None = None) -> None:
    """Read the settings again and apply them to the running server; invalid settings change nothing."""
    systemd.reloading()
    try:
        settings = reload_settings(context.settings, read)
        if settings is not None:
            adopt(context, settings, tls)
    finally:
        systemd.ready()


@contextlib.contextmanager
def signals(end: Callable[[], None], reload: Callable[[], None] | None = None) -> Iterator[None]:
    """Call ``end`` on SIGTERM and SIGINT, and ``reload`` on SIGHUP, during the block.

    If SIGHUP was sent because the terminal closed, ``end`` is called instead. If ``reload`` is ``None``, the handler of
    SIGHUP is not changed. Outside the main thread, no signal is handled.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    had_terminal = os.isatty(_STDIN)

    def hang_up() -> None:
        closed = had_terminal and not os.isatty(_STDIN)
        (end if closed or reload is None else reload)()

    handlers = {signal.SIGTERM: end, signal.SIGINT: end}
    if reload is not None:
        handlers[signal.SIGHUP] = hang_up
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)

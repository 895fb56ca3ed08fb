"""A client's TLS settings, and checks that its token fits into a header and is not sent unencrypted."""

from __future__ import annotations

import logging
import os
import ssl
from pathlib import Path

from taskqueue_core.errors import ConfigurationError

_log = logging.getLogger("taskqueue.client")


def check_token(token: str | None) -> None:
    """Raise `ConfigurationError` if an HTTP header cannot contain the token. The error does not show the token."""
    if token is not None and not (
        token.isascii() and token.isprintable() and token == token.strip()
    ):
        raise ConfigurationError(
            "TASKQUEUE_TOKEN: must be printable ASCII without spaces around it"
        )


def trusting(
    authorities: Path | str | None, *, setting: str = "TASKQUEUE_TLS_CA"
) -> ssl.SSLContext | None:
    """Return a TLS context that trusts only the authorities in a PEM file; ``None`` if no file is given.

    The context verifies host names and requires TLS 1.2 or newer. Raises `ConfigurationError`, which names the setting,
    if the file cannot be used.
    """
    if authorities is None:
        return None
    try:
        context = ssl.create_default_context(cafile=str(authorities))
    except ssl.SSLError:
        raise ConfigurationError(f"{setting}: the file contains no PEM certificate") from None
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else type(error).__name__
        raise ConfigurationError(f"{setting}: the file cannot be read: {reason}") from None
    context.minimum_version = max(context.minimum_version, ssl.TLSVersion.TLSv1_2)
    return context


def warn_if_readable(shown: str, token: str | None, *, loopback: bool) -> None:
    """Log a warning if the token is sent over the network without encryption."""
    if token is not None and not loopback and shown.startswith(("http:", "ws:")):
        _log.warning("token and tasks are sent to %s unencrypted; use https", shown)

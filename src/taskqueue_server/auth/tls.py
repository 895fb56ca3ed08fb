"""TLS of the server: version 1.2 or later, with the configured certificate."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from taskqueue_core.config import Settings
from taskqueue_core.errors import ConfigurationError


def server_context(settings: Settings) -> ssl.SSLContext | None:
    """Return the TLS context for connections, or ``None`` for a server without TLS.

    Raises `ConfigurationError`, which names the setting, if a file cannot be read or is invalid.
    """
    certificate, key = settings.tls_certificate, settings.tls_key
    if certificate is None:
        if key is not None:
            raise ConfigurationError("TASKQUEUE_TLS_KEY requires TASKQUEUE_TLS_CERTIFICATE")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _check("TASKQUEUE_TLS_CERTIFICATE", certificate)
    if key is not None:
        _check("TASKQUEUE_TLS_KEY", key)
    # With the empty password, OpenSSL refuses an encrypted key instead of asking for its password on the terminal.
    try:
        context.load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, ValueError) as error:
        raise ConfigurationError(
            "TASKQUEUE_TLS_CERTIFICATE, TASKQUEUE_TLS_KEY: expected a certificate chain and its key in PEM format, "
            f"without a password ({getattr(error, 'reason', None) or type(error).__name__})"
        ) from None
    return context


def _check(name: str, path: Path) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else type(error).__name__
        raise ConfigurationError(f"{name}: {path} cannot be read: {reason}") from None

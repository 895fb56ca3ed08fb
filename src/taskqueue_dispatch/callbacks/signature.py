"""Signatures of callbacks, after Standard Webhooks 1.0."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from datetime import UTC, datetime

from pydantic import SecretStr
from standardwebhooks import Webhook

from taskqueue_core.errors import ConfigurationError

_PREFIX = "whsec_"
_BYTES = range(24, 65)
_FORM = f"a secret must be {_PREFIX} followed by base64 of {_BYTES.start} to {_BYTES.stop - 1} random bytes"


class Signer:
    """Signs with each of its secrets: during a rotation receivers know the old one or the new one."""

    def __init__(self, secrets: Sequence[SecretStr]) -> None:
        """Raises `ConfigurationError` for what is no secret of this kind. None is shown."""
        self._keys = tuple(
            Webhook(_key(index, secret.get_secret_value()))
            for index, secret in enumerate(secrets, start=1)
        )

    @property
    def signs(self) -> bool:
        """Whether there is a secret."""
        return bool(self._keys)

    def headers(self, webhook_id: str, at: float, body: bytes) -> dict[str, str]:
        """Return the headers of one attempt at the time ``at``, Unix seconds; unsigned where there is no secret.

        The id stays the same over attempts, the time does not. The body is UTF-8. Raises `ValueError` for an id with
        a dot in it: what is signed has its parts joined by dots.
        """
        if "." in webhook_id:
            raise ValueError("the id of a webhook must not contain a dot")
        when = datetime.fromtimestamp(int(at), UTC)
        signatures = [key.sign(webhook_id, when, body.decode()) for key in self._keys]
        values = {"webhook-id": webhook_id, "webhook-timestamp": str(int(at))}
        return values | ({"webhook-signature": " ".join(signatures)} if signatures else {})


def _key(index: int, secret: str) -> bytes:
    # The library takes any text, and drops what is no base64: a mistyped secret would sign with another key.
    kind, prefix, text = secret.rpartition(_PREFIX)
    try:
        key = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if kind or not prefix or len(key) not in _BYTES:
        raise ConfigurationError(f"TASKQUEUE_DISPATCH_WEBHOOK_SECRETS, number {index}: {_FORM}")
    return key

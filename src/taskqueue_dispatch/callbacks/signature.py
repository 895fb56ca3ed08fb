"""Signatures of callbacks, according to Standard Webhooks 1.0."""

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
    """A signer with one or more secrets. It signs with each, so that a secret can be rotated."""

    def __init__(self, secrets: Sequence[SecretStr]) -> None:
        """Create a signer. Raises `ConfigurationError` for an invalid secret, without showing it."""
        self._keys = tuple(
            Webhook(_key(index, secret.get_secret_value()))
            for index, secret in enumerate(secrets, start=1)
        )

    @property
    def signs(self) -> bool:
        """Whether there is a secret."""
        return bool(self._keys)

    def headers(self, webhook_id: str, at: float, body: bytes) -> dict[str, str]:
        """Return the headers of one attempt at the time ``at`` (Unix seconds); without a secret there is no signature.

        The id is the same for all attempts. The body is UTF-8. Raises `ValueError` for an id that contains a dot,
        because dots separate the parts of the signed text.
        """
        if "." in webhook_id:
            raise ValueError("the id of a webhook must not contain a dot")
        when = datetime.fromtimestamp(int(at), UTC)
        signatures = [key.sign(webhook_id, when, body.decode()) for key in self._keys]
        values = {"webhook-id": webhook_id, "webhook-timestamp": str(int(at))}
        return values | ({"webhook-signature": " ".join(signatures)} if signatures else {})


def _key(index: int, secret: str) -> bytes:
    # The library ignores characters that are not base64: with a mistyped secret it would sign with another key.
    kind, prefix, text = secret.rpartition(_PREFIX)
    try:
        key = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if kind or not prefix or len(key) not in _BYTES:
        raise ConfigurationError(f"TASKQUEUE_DISPATCH_WEBHOOK_SECRETS, number {index}: {_FORM}")
    return key

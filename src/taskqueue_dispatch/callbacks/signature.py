"""Signatures of callbacks as specified by Standard Webhooks 1.0."""

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
    """A signer that signs with each of its secrets, so that receivers can change from an old secret to a new one."""

    def __init__(self, secrets: Sequence[SecretStr]) -> None:
        """Create a signer.

        Raises `ConfigurationError` for an invalid secret; the error does not contain the secret.
        """
        self._keys = tuple(
            Webhook(_key(index, secret.get_secret_value()))
            for index, secret in enumerate(secrets, start=1)
        )

    @property
    def signs(self) -> bool:
        """Whether a secret is configured."""
        return bool(self._keys)

    def headers(self, webhook_id: str, at: float, body: bytes) -> dict[str, str]:
        """Return the headers of one attempt. Without a secret, there is no signature header.

        ``at`` is the time of the attempt in Unix seconds. All attempts of a callback have the same ``webhook_id``.
        ``body`` must be UTF-8. Raises `ValueError` for an id that contains a dot, because dots separate the parts of
        the signed text.
        """
        if "." in webhook_id:
            raise ValueError("the id of a webhook must not contain a dot")
        when = datetime.fromtimestamp(int(at), UTC)
        signatures = [key.sign(webhook_id, when, body.decode()) for key in self._keys]
        values = {"webhook-id": webhook_id, "webhook-timestamp": str(int(at))}
        return values | ({"webhook-signature": " ".join(signatures)} if signatures else {})


def _key(index: int, secret: str) -> bytes:
    # Decode the secret here, because the library ignores invalid base64 and would sign with another key.
    kind, prefix, text = secret.rpartition(_PREFIX)
    try:
        key = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if kind or not prefix or len(key) not in _BYTES:
        raise ConfigurationError(f"TASKQUEUE_DISPATCH_WEBHOOK_SECRETS, secret {index}: {_FORM}")
    return key

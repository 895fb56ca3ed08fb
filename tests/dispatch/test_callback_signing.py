"""Tests of the signatures of callbacks."""

from __future__ import annotations

import base64
import secrets
import time

import pytest
from pydantic import SecretStr
from standardwebhooks import Webhook, WebhookVerificationError

from taskqueue_core.errors import ConfigurationError
from taskqueue_dispatch.callbacks.signature import Signer

KEY = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
BODY = b'{"test": 2432232314}'
ID = "msg_p5jXN8AQM9LWM0D4loKWxJek"
AT = 1614265330
SIGNATURE = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
"""the signature of these values in the test suites of the Standard Webhooks libraries"""


def key(size: int = 32) -> str:
    """Return a new random secret."""
    return "whsec_" + base64.b64encode(secrets.token_bytes(size)).decode()


def signer(*told: str) -> Signer:
    """Return a signer with these secrets."""
    return Signer([SecretStr(one) for one in told])


def test_the_official_vector() -> None:
    """The signature matches the test vector of the Standard Webhooks libraries (fault I4)."""
    assert signer(KEY).headers(ID, AT, BODY) == {
        "webhook-id": ID,
        "webhook-timestamp": str(AT),
        "webhook-signature": SIGNATURE,
    }
    assert signer(KEY).headers(ID, AT + 0.999, BODY)["webhook-signature"] == SIGNATURE


@pytest.mark.parametrize("body", ["null", '{"ü":"\u2028\U0001f600\\u0000"}', r'"\""', '["\u00a0"]'])
def test_any_text(body: str) -> None:
    """A body verifies exactly as it was sent, and not if any byte is changed (fault I4)."""
    secret = key()
    headers = signer(secret).headers(ID, time.time(), body.encode())
    Webhook(secret).verify(body.encode(), headers, json_parse=False)
    for other in (body + " ", body.replace('"', "'", 1) + "."):
        with pytest.raises(WebhookVerificationError):
            Webhook(secret).verify(other, headers, json_parse=False)


def test_rotation() -> None:
    """During a rotation of secrets, a receiver can verify with the old or the new secret only (fault I4)."""
    old, new = key(24), key(64)
    headers = signer(old, new).headers(ID, time.time(), BODY)
    assert headers["webhook-signature"].count(" ") == 1
    for secret in (old, new):
        assert Webhook(secret).verify(BODY, headers) == {"test": 2432232314}
    with pytest.raises(WebhookVerificationError):
        Webhook(key()).verify(BODY, headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(old).verify(BODY, signer(new).headers(ID, time.time(), BODY))


@pytest.mark.parametrize(("off", "good"), [(-290, True), (290, True), (-310, False), (310, False)])
def test_clocks(off: float, good: bool) -> None:  # noqa: FBT001 - pytest passes it by name
    """A receiver accepts a timestamp up to five minutes off its own clock, and no other (fault I4)."""
    headers = signer(KEY).headers(ID, time.time() + off, BODY)
    if good:
        Webhook(KEY).verify(BODY, headers)
    else:
        with pytest.raises(WebhookVerificationError, match="timestamp"):
            Webhook(KEY).verify(BODY, headers)


def test_the_time_is_signed() -> None:
    """The timestamp is signed, so an old callback cannot be replayed with a new timestamp (fault I4)."""
    headers = signer(KEY).headers(ID, time.time() - 1000, BODY)
    with pytest.raises(WebhookVerificationError, match="No matching"):
        Webhook(KEY).verify(BODY, headers | {"webhook-timestamp": str(int(time.time()))})


def test_no_dot_in_an_id() -> None:
    """An id with a dot cannot be signed, because dots separate the signed parts (fault I4)."""
    with pytest.raises(ValueError, match="dot"):
        signer(KEY).headers("msg.1", AT, BODY)


def test_without_a_secret() -> None:
    """Without a secret, the callback has no signature header (OPEN-C7)."""
    assert not signer().signs
    assert signer(KEY).signs
    assert set(signer().headers(ID, AT, BODY)) == {"webhook-id", "webhook-timestamp"}


@pytest.mark.parametrize(
    "secret",
    [
        "", "whsec_", KEY.removeprefix("whsec_"), "WHSEC_" + KEY[6:], "whsk_" + KEY[6:], " " + KEY, KEY + " ",
        KEY[:-1], KEY[:-4] + "-___", KEY[:-4] + "ü", KEY[:20] + "\n" + KEY[20:], KEY + KEY, key(23), key(65),
    ],
    ids=range(14),
)  # fmt: skip
def test_what_is_no_secret(secret: str) -> None:
    """An invalid secret is refused at the start, with its position but without its value (fault I4)."""
    with pytest.raises(ConfigurationError, match="WEBHOOK_SECRETS, secret 2") as caught:
        signer(key(), secret)
    assert secret[6:] not in str(caught.value) or len(secret) < 8
    assert "MfKQ" not in str(caught.value)


def test_secrets_stay_inside() -> None:
    """No repr shows a secret (Security 24)."""
    told = signer(KEY)
    assert "MfKQ" not in repr(told)
    assert "MfKQ" not in repr(vars(told))

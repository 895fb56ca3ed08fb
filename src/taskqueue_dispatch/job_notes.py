"""Notes about a job that are stored with its slot: results that its server pushed, and where the job was sent.

A server pushes a result with a *push token*: the token of the job's slot, and a MAC of the job's id and that token. The
MAC shows that a dispatcher has issued the token for the job, so a forged push is refused without a call to the store.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from hashlib import sha256
from typing import Any

import msgspec

from taskqueue_core.tasks import Delivery
from taskqueue_dispatch.endpoint_client.answers import (
    DONE,
    FAILED,
    Answer,
    Done,
    JobAcceptedAnswer,
    JobFailedAnswer,
    shown,
)

_ACCEPTED = "accepted"
_DIGITS = 16
_MAC_DIGITS = 32


class SentJob(msgspec.Struct, frozen=True, kw_only=True):
    """A note that says where an attempt of a job was sent. The job's next dispatcher asks that server first."""

    status: str = _ACCEPTED
    accepted: str
    """the server's id for the job"""
    url: str = ""
    """URL of the endpoint to which the job was sent"""
    attempt: int = 0
    payload: str = ""
    """digest of the payload, since the id of a job that was deleted can be used again"""


class _Pushed(msgspec.Struct):
    status: str
    result: msgspec.Raw = msgspec.Raw(b"null")
    error: Any = None
    final: Any = None
    accepted: str | None = None


_pushed = msgspec.json.Decoder(_Pushed)
_sent = msgspec.json.Decoder(SentJob)


def answer_of(note: bytes) -> Answer | None:
    """Return the answer that a note contains, or ``None`` if it contains none or is not valid."""
    try:
        decoded = _pushed.decode(note)
    except msgspec.MsgspecError:
        return None
    if decoded.status in DONE:
        return Done(bytes(decoded.result))
    if decoded.status in FAILED:
        return JobFailedAnswer(shown(decoded.error), final=decoded.final is True)
    return None if decoded.accepted is None else JobAcceptedAnswer(decoded.accepted)


def result_note(result: bytes) -> bytes:
    """Return a note that contains a result, as a server pushes it."""
    return b'{"status":"success","result":%b}' % result


def sent_note(delivery: Delivery, remote_id: str, url: str) -> bytes:
    """Return a note that says where this attempt of the job was sent. ``remote_id`` is the server's id for the job."""
    note = SentJob(accepted=remote_id, url=url, attempt=delivery.attempt, payload=_digest(delivery))
    return msgspec.json.encode(note)


def sent_before(delivery: Delivery, notes: Iterable[bytes]) -> SentJob | None:
    """Return the last of these notes that says where this attempt of the job was sent, or ``None``."""
    last = None
    for note in notes:
        try:
            sent = _sent.decode(note)
        except msgspec.MsgspecError:
            continue
        same = (sent.attempt, sent.payload) == (delivery.attempt, _digest(delivery))
        if sent.status == _ACCEPTED and same:
            last = sent
    return last


def _digest(delivery: Delivery) -> str:
    return sha256(delivery.task.payload).hexdigest()[:_DIGITS]


def push_token(secret: str, job: str, lease_token: str) -> str:
    """Return the token with which a server may push the result of a job. ``secret`` is the pool's secret."""
    return f"{lease_token}.{_mac(secret, job, lease_token)}"


def lease_token_of(secrets: Iterable[str], job: str, token: str) -> str | None:
    """Return the slot's token in a push token, or ``None`` if none of the pool's secrets has signed it for the job."""
    lease_token, _, mac = token.rpartition(".")
    signed = (_mac(secret, job, lease_token) for secret in secrets)
    return lease_token if any(hmac.compare_digest(each, mac) for each in signed) else None


def _mac(secret: str, job: str, lease_token: str) -> str:
    text = f"push\n{job}\n{lease_token}".encode()
    return hmac.digest(secret.encode(), text, "sha256").hex()[:_MAC_DIGITS]

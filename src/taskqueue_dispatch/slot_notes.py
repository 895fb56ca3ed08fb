"""Notes that are left for the holder of a job's slot: what its server has pushed, or by which id it knows the job."""

from __future__ import annotations

from typing import Any

import msgspec

from taskqueue_dispatch.endpoint_client.answers import (
    DONE,
    FAILED,
    Answer,
    Done,
    JobAcceptedAnswer,
    JobFailedAnswer,
    shown,
)

__all__ = ["accepted_note", "answer_of"]


class _Pushed(msgspec.Struct):
    status: str
    result: msgspec.Raw = msgspec.Raw(b"null")
    error: Any = None
    final: Any = None
    accepted: str | None = None


_decoder = msgspec.json.Decoder(_Pushed)


def accepted_note(remote_id: str) -> bytes:
    """Return a note that a server knows the job by this id."""
    return msgspec.json.encode({"status": "accepted", "accepted": remote_id})


def answer_of(note: bytes) -> Answer | None:
    """Return what a note says; ``None`` where that is nothing of use."""
    try:
        decoded = _decoder.decode(note)
    except msgspec.MsgspecError:
        return None
    if decoded.status in DONE:
        return Done(bytes(decoded.result))
    if decoded.status in FAILED:
        return JobFailedAnswer(shown(decoded.error), final=decoded.final is True)
    return None if decoded.accepted is None else JobAcceptedAnswer(decoded.accepted)

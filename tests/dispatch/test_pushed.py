"""Tests of how a note at a job's slot, for example a pushed result, is interpreted."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from taskqueue_core.tasks import Delivery, Task
from taskqueue_dispatch.endpoint_client.answers import (
    DONE,
    FAILED,
    Done,
    JobAcceptedAnswer,
    JobFailedAnswer,
)
from taskqueue_dispatch.job_notes import answer_of, sent_before, sent_note

URL = "http://127.0.0.1:1/generate"


def note(**fields: Any) -> bytes:
    """Return a note with these fields, as a GPU server pushes it."""
    return msgspec.json.encode(fields)


@pytest.mark.parametrize("word", sorted(DONE))
def test_success(word: str) -> None:
    """Each word for success means the same in a push as in a response (C4, C7)."""
    assert answer_of(b'{"status": "' + word.encode() + b'", "result": {"a" :1.50}}') == Done(
        b'{"a" :1.50}'
    )


@pytest.mark.parametrize("word", sorted(FAILED))
def test_failure(word: str) -> None:
    """Each word for failure fails the job, for good if ``final`` is true, with a printable error (C4, C7)."""
    assert answer_of(note(status=word, error="out of\r\nmemory")) == JobFailedAnswer(
        "out of  memory"
    )
    assert answer_of(note(status=word, error="no", final=True)) == JobFailedAnswer("no", final=True)
    assert answer_of(note(status=word, error="no", final="yes")) == JobFailedAnswer("no")
    told = answer_of(note(status=word, error="x" * 5000))
    assert isinstance(told, JobFailedAnswer)
    assert len(told.error) == 1000


def test_an_id() -> None:
    """A note with the GPU server's id of a job is read as an accepted job (C5)."""
    assert answer_of(sent_note(_delivery(), "r-1", URL)) == JobAcceptedAnswer("r-1")


def _delivery(attempt: int = 1, payload: object = 1) -> Delivery:
    task = Task.of("dispatch:flux", payload, id="job")
    return Delivery(task=task, receipt="r", attempt=attempt, delivered_at=0.0)


def test_where_it_was_sent() -> None:
    """The last note of the same attempt and payload says where a job was sent; all other notes are ignored (U26)."""
    notes = [
        sent_note(_delivery(), "r-1", URL),
        sent_note(_delivery(), "r-2", URL),
        sent_note(_delivery(attempt=2), "r-3", URL),
        sent_note(_delivery(payload=2), "r-4", URL),
        note(status="done", accepted="r-5", attempt=1),
        b"{",
    ]
    sent = sent_before(_delivery(), notes)
    assert sent is not None
    assert (sent.accepted, sent.url) == ("r-2", URL)
    assert sent_before(_delivery(attempt=3), notes) is None


@pytest.mark.parametrize("told", [b"", b"{", b"[]", b'{"status":"processing"}', b'{"status":7}'])
def test_nothing_of_use(told: bytes) -> None:
    """A note with any other content is ignored (fault H5)."""
    assert answer_of(told) is None

"""Notes at a job's slot: what they say, whatever they are."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from taskqueue_dispatch.endpoint_client.answers import (
    DONE,
    FAILED,
    Done,
    JobAcceptedAnswer,
    JobFailedAnswer,
)
from taskqueue_dispatch.job_attempt import accepted_note, answer_of


def note(**fields: Any) -> bytes:
    """What a server has pushed."""
    return msgspec.json.encode(fields)


@pytest.mark.parametrize("word", sorted(DONE))
def test_success(word: str) -> None:
    """Each word of success that is one in an answer is one in a push (C4, C7)."""
    assert answer_of(b'{"status": "' + word.encode() + b'", "result": {"a" :1.50}}') == Done(
        b'{"a" :1.50}'
    )


@pytest.mark.parametrize("word", sorted(FAILED))
def test_failure(word: str) -> None:
    """Each word of failure is one, final only where the server says so, in a line that may be shown (C4, C7)."""
    assert answer_of(note(status=word, error="out of\r\nmemory")) == JobFailedAnswer(
        "out of  memory"
    )
    assert answer_of(note(status=word, error="no", final=True)) == JobFailedAnswer("no", final=True)
    assert answer_of(note(status=word, error="no", final="yes")) == JobFailedAnswer("no")
    told = answer_of(note(status=word, error="x" * 5000))
    assert isinstance(told, JobFailedAnswer)
    assert len(told.error) == 1000


def test_an_id() -> None:
    """A note of the id that a server knows the job by is read again (C5)."""
    assert answer_of(accepted_note("r-1")) == JobAcceptedAnswer("r-1")


@pytest.mark.parametrize("told", [b"", b"{", b"[]", b'{"status":"processing"}', b'{"status":7}'])
def test_nothing_of_use(told: bytes) -> None:
    """Whatever else is there says nothing, and is no error (fault H5)."""
    assert answer_of(told) is None

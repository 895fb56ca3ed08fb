"""Tests of how a job becomes a task, and of its id and queue name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import Task
from taskqueue_dispatch.jobs import (
    Submission,
    callback_url_of,
    model_of,
    model_of_queue,
    task_of,
)
from taskqueue_dispatch.names import mark_of, queue_of
from tests.dispatch.desk import SPELLINGS

HOOK = "https://client.example/hook?secret=1"


def test_a_job_as_a_task() -> None:
    """A job becomes a task with the client's unchanged payload, and with the callback URL only in a header (C6, C7)."""
    task = task_of(
        Submission(
            model="flux",
            payload=b'{ "prompt":"a sunset" }',
            callback_url=HOOK,
            priority=9,
            deadline=2_000_000_000,
            not_before=1_900_000_000,
            tenant="acme",
        )
    )
    assert task.payload == b'{ "prompt":"a sunset" }'
    assert task.headers == {"model": "flux", "callback-url": HOOK}
    assert (task.priority, task.deadline, task.not_before) == (9, 2_000_000_000, 1_900_000_000)
    assert (task.key, task.tenant) == (queue_of("flux"), "acme")
    assert callback_url_of(task) == HOOK
    assert callback_url_of(task_of(Submission(model="flux"))) is None


def test_ids() -> None:
    """A job's id depends on model, tenant and idempotency key; without a key it is random (C6, OPEN-C1)."""
    one = Submission(model="flux", idempotency_key="k", tenant="a")
    assert task_of(one).id == task_of(one).id
    others = (
        Submission(model="flux", idempotency_key="k", tenant="b"),
        Submission(model="flux", idempotency_key="k"),
        Submission(model="sdxl", idempotency_key="k", tenant="a"),
        Submission(model="flux", idempotency_key="l", tenant="a"),
        Submission(model="flux", tenant="a"),
        Submission(model="flux", tenant="a"),
    )
    assert len({task_of(each).id for each in (one, *others)}) == 7


@pytest.mark.parametrize("model", SPELLINGS)
def test_models_of_any_spelling(model: str) -> None:
    """A task's model is found from its header, queue name and id, whatever characters it contains (OPEN-C5, H7)."""
    task = task_of(Submission(model=model))
    assert model_of(task) == model
    assert task.id.startswith(f"{mark_of(model)}-")
    assert model_of_queue(task.key) in {model, None}


@given(st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=60))
def test_queues_tell_their_models(model: str) -> None:
    """A queue name that is not shortened leads back to its model, and never to another model (OPEN-C5)."""
    if model.isprintable():
        key = queue_of(model)
        assert model_of_queue(key) == (None if "~" in key else model)


@pytest.mark.parametrize(
    "key",
    ["work", "dispatch:", "dispatch:=4", "dispatch:=41", "dispatch:=FF", "dispatch.callbacks", "dispatch:a~b"],
)  # fmt: skip
def test_queues_that_are_no_models(key: str) -> None:
    """A queue name that does not belong to a model gives ``None`` (OPEN-C5)."""
    assert model_of_queue(key) is None


def test_a_task_that_another_has_put_there() -> None:
    """A task's model header is used only if it agrees with the task's queue (OPEN-C5)."""
    key = queue_of("flux")
    assert model_of(Task(key=key, headers={"model": "sdxl"})) == "flux"
    assert model_of(Task(key=key)) == "flux"
    assert model_of(Task(key=key, headers={"model": ""})) == "flux"
    with pytest.raises(InvalidInput):
        model_of(Task(key="work", headers={"model": "flux"}))
    with pytest.raises(InvalidInput):
        model_of(Task(key=queue_of("模" * 200)))


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("model", {"model": ""}),
        ("model", {"model": "a\nb"}),
        ("callback_url", {"callback_url": ""}),
        ("callback_url", {"callback_url": "https://x/\r\nX: secret"}),
        ("callback_url", {"callback_url": "https://x/" + "a" * LIMITS.url}),
        ("payload", {"payload": b"secret"}),
        ("payload", {"payload": b'"' + b"x" * LIMITS.payload + b'"'}),
        ("priority", {"priority": 10}),
        ("deadline", {"deadline": float("nan")}),
        ("not_before", {"not_before": -1.0}),
        ("tenant", {"tenant": "two words"}),
        ("idempotency_key", {"idempotency_key": "secret words"}),
    ],
)
def test_what_is_no_job(field: str, fields: dict[str, object]) -> None:
    """An invalid value is refused with the name of its field, and is not shown (C6)."""
    with pytest.raises(InvalidInput) as caught:
        task_of(Submission(**({"model": "flux"} | fields)))  # type: ignore[arg-type] # on purpose
    assert caught.value.field == field
    assert "secret" not in str(caught.value)


def test_a_key_of_a_tenant_that_cannot_be() -> None:
    """A job's id is built from valid parts only, so that different keys never give the same id (OPEN-C1, OPEN-C5)."""
    with pytest.raises(InvalidInput):
        task_of(Submission(model="flux", idempotency_key="a/b"))
    with pytest.raises(InvalidInput):
        task_of(Submission(model="flux", tenant="a/b", idempotency_key="c"))

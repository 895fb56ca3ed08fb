"""A job as a task, and its names."""

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
    """A job is a task with the client's payload as it came, and its URL in a header alone (C6, C7)."""
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
    """An id is the same for the same model, tenant and key, and a fresh one without a key (C6, OPEN-C1)."""
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
    """A job tells its model by its header, its queue's name and its id, however that is spelled (OPEN-C5, H7)."""
    task = task_of(Submission(model=model))
    assert model_of(task) == model
    assert task.id.startswith(f"{mark_of(model)}-")
    assert model_of_queue(task.key) in {model, None}


@given(st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=60))
def test_queues_tell_their_models(model: str) -> None:
    """The name of a queue that is not cut leads back to its model, and never to another (OPEN-C5)."""
    if model.isprintable():
        key = queue_of(model)
        assert model_of_queue(key) == (None if "~" in key else model)


@pytest.mark.parametrize(
    "key",
    ["work", "dispatch:", "dispatch:=4", "dispatch:=41", "dispatch:=FF", "dispatch.callbacks", "dispatch:a~b"],
)  # fmt: skip
def test_queues_that_are_no_models(key: str) -> None:
    """The name of another queue leads nowhere (OPEN-C5)."""
    assert model_of_queue(key) is None


def test_a_task_that_another_has_put_there() -> None:
    """What a task says of its model is believed where its queue agrees (OPEN-C5)."""
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
    """What can't be is refused with the name of its field, and not shown (C6)."""
    with pytest.raises(InvalidInput) as caught:
        task_of(Submission(**({"model": "flux"} | fields)))  # type: ignore[arg-type] # on purpose
    assert caught.value.field == field
    assert "secret" not in str(caught.value)


def test_a_key_of_a_tenant_that_cannot_be() -> None:
    """An id is made of valid parts alone, so that no two clients' keys meet (OPEN-C1, OPEN-C5)."""
    with pytest.raises(InvalidInput):
        task_of(Submission(model="flux", idempotency_key="a/b"))
    with pytest.raises(InvalidInput):
        task_of(Submission(model="flux", tenant="a/b", idempotency_key="c"))

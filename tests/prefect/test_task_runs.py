"""Tests that each task run sent to a worker is one that Prefect accepts."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import TASK_RUN_BYTES
from taskqueue_core.tasks import Task
from taskqueue_server.prefect.task_run import refusal
from tests.prefect.environment import PROGRAMS
from tests.prefect.support import KEY, task_run

TIMES = [
    "2026-01-01",
    "2026-01-01T00:00:00",
    "2026-01-01T00:00:00Z",
    "2026-01-01T00:00:00.123456789+14:00",
    "0001-01-01T00:00:00+23:59",
    "9999-12-31T23:59:59.999999-23:59",
    "2026-02-30T00:00:00Z",
    "PT1H",
]
INPUTS: list[Any] = [
    [{"input_type": "task_run", "id": str(uuid4())}, {"input_type": "constant", "type": "q"}],
    [{"input_type": "parameter", "name": "q"}, {"input_type": "flow_run", "id": str(uuid4())}],
    [{"input_type": "parameter"}],
    [{"name": "q"}],
    [None],
]
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 1.5, -0.0, 2**53, 2**63, 2**64, 10**30, 1e300),
    *("", "x", "a/b%&<>", "é\u2028\0", "x" * 5000, "SCHEDULED", "PENDING"),
    *(str(uuid4()), uuid4().hex, uuid4().urn, f"{{{uuid4()}}}"),
    *TIMES,
    *([], [1], ["a"], [1.5, 2], [None], {}, {"a": 1}, {"a": None}, {"a": "b"}, {"": 1.5}),
    *({"a": inputs} for inputs in INPUTS),
]
RAW = (
    "1e999",
    r'"\ud800"',
    "NaN",
    "-Infinity",
    "1E400",
    r'"\u0000"',
    "01",
    "[[[]]]",
    '"\t"',
    "1.0",
)


def paths(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of each field in an object, including nested ones."""
    if path:
        yield path
    if isinstance(value, dict):
        for name in value:
            yield from paths(value[name], (*path, name))


def changed(whole: dict[str, Any]) -> Iterator[str]:
    """Yield the object as JSON with each field in turn removed or replaced by each value, and some invalid texts."""
    for path in paths(whole):
        for value in [*VALUES, ...]:
            new = copy.deepcopy(whole)
            place = new
            for name in path[:-1]:
                place = place[name]
            if value is ...:
                del place[path[-1]]
            else:
                place[path[-1]] = value
            yield json.dumps(new)
    text = json.dumps(whole)
    for raw in RAW:
        for name in ("extra", "tags", "run_count", "name", "total_run_time", "labels"):
            yield f'{text[:-1]},"{name}":{raw}}}'
    yield from (
        "",
        "null",
        "1",
        '"a"',
        "[]",
        "{}",
        text[:-1],
        f"\ufeff{text}",
        f" {text}\n",
        text * 2,
    )


def accepted(text: str) -> bool:
    """Return whether the text can be published and would be sent to a worker."""
    try:
        return refusal(Task(key=KEY, payload=text.encode())) is None
    except InvalidInput:
        return False


@pytest.fixture
def prefect(prefect_python: str, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a Prefect process that prints an example, and validates each line that it reads."""
    with subprocess.Popen(
        [prefect_python, str(PROGRAMS / "validate.py")],
        env={"PREFECT_HOME": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as started:
        yield started
        started.kill()


def test_what_is_sent_is_what_prefect_takes(prefect: subprocess.Popen[str]) -> None:
    """E7: of thousands of faulty task runs, none that would be sent is refused by Prefect, which would end a worker."""
    assert prefect.stdout is not None
    example = prefect.stdout.readline()
    whole = json.loads(example)
    # the example is not a deferred run, so it is not for a task worker
    assert not accepted(example)
    whole["state"]["state_details"]["deferred"] = True
    assert accepted(json.dumps(whole))
    texts = [json.dumps(whole), json.dumps(task_run()), *changed(whole)]
    sent = [text for text in texts if accepted(text)]
    assert len(texts) / 2 > len(sent) > 400
    told, _ = prefect.communicate("".join(f"{json.dumps(text)}\n" for text in sent), timeout=120)
    answers = told.splitlines()
    assert len(answers) == len(sent)
    assert [text for text, answer in zip(sent, answers, strict=True) if answer == "0"] == []


def test_another_key() -> None:
    """A run whose task key differs from its queue's key is refused, because it would end the worker."""
    payload = json.dumps(task_run("other-1a2b3c4d")).encode()
    assert refusal(Task(key=KEY, payload=payload)) == (
        "the task_key of the run differs from the key of its queue"
    )


def test_the_size_of_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is larger than a worker's limit is refused.

    Otherwise the worker would reconnect and get it again, forever.
    """
    task = Task.of(KEY, task_run())
    assert refusal(task) is None
    monkeypatch.setattr("taskqueue_server.prefect.task_run.TASK_RUN_BYTES", 100)
    assert refusal(task) == f"the run has {len(task.payload)} bytes; the maximum is 100"
    assert TASK_RUN_BYTES == 1024 * 1024

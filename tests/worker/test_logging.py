"""What a handler logs appears, with the fields of its task; a failure is one record."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import sys
import traceback
from asyncio.subprocess import PIPE
from contextvars import ContextVar
from typing import Any

import pytest

from taskqueue_core.application.rules import ErrorRules
from taskqueue_core.limits import LIMITS
from taskqueue_core.logs import formatter
from taskqueue_core.protocol.frames import AckFrame, DeadLetterFrame, Feature, RetryFrame
from taskqueue_worker import Reject, Retry, Snooze, Worker
from taskqueue_worker.task_log import FIELDS, TaskLog
from tests.worker.fake import PATIENCE, FakeServer, running, work
from tests.worker.logged import tasks

SECRET = "hunter2"


async def _stderr(server: FakeServer, target: str, *words: str) -> str:
    """Run ``taskqueue worker`` until its two tasks have failed, and return what it wrote to stderr."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "taskqueue_cli", "worker", target, "--url", server.url),
        *("--worker-id", "w-1", *words),
        stdout=PIPE,
        stderr=PIPE,
    )
    try:
        async with asyncio.timeout(PATIENCE):
            peer = await server.welcomed()
            for key in ("coroutine", "thread"):
                await peer.deliver(work({"secret": SECRET}, key=key))
                await peer.next(RetryFrame)
            child.terminate()
            _, text = await child.communicate()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    return text.decode()


async def test_the_command_shows_what_handlers_log(server: FakeServer) -> None:
    """U10: with JSON, the records of stdlib and structlog, in the loop and in threads, have the task's fields.

    Fields of the application are written as they are. A failure is one object, whose traceback is one field.
    """
    text = await _stderr(server, "tests.worker.logged:tasks", "--log-format", "json")
    lines = [json.loads(line) for line in text.splitlines()]
    mine = [line for line in lines if line["logger"] == "shop"]
    told = [(line["event"], line["key"], line.get("width")) for line in mine]
    assert told == [
        ("resizing cat.png", "its own", 3),
        ("in a thread", "coroutine", None),
        ("sized", "coroutine", 4),
        ("sized", "thread", 4),
    ]
    for line in mine:
        assert (line["worker_id"], line["attempt"], line["tenant"]) == ("w-1", 1, None)
        assert line["task_id"].startswith("t")
    failures = [line for line in lines if "failed" in line["event"]]
    assert [line["key"] for line in failures] == ["coroutine", "thread"]
    for line in failures:
        assert line["exception"].startswith("Traceback")
        assert SECRET in line["exception"]
        assert "src/taskqueue_" not in line["exception"]
    assert "direct cause" in failures[1]["exception"]


async def test_the_program_configures_logging(server: FakeServer) -> None:
    """U10: the worker adds nothing to a root logger that has handlers; each record appears once, in its format."""
    text = await _stderr(server, "tests.worker.configured:tasks", "--log-format", "json")
    lines = text.splitlines()
    assert lines.count("MINE resizing cat.png") == 1
    assert sum("failed (attempt 1)" in line for line in lines) == 2
    assert not any(line.startswith("{") for line in lines)


async def test_records_carry_the_fields(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """U10: records of running tasks have the fields as attributes, and others have none; a batch has only some.

    A field of the application with the same name replaces the task's.
    """
    caplog.set_level(logging.INFO)
    async with running(Worker(tasks, url=server.url, worker_id="w-2")):
        peer = await server.welcomed()
        await peer.deliver(delivery := work({"secret": SECRET}, key="coroutine"))
        await peer.next(RetryFrame)
        await peer.deliver(work(1, key="batch"), work(2, key="batch"))
        await peer.next(AckFrame)
    logging.getLogger("shop").info("outside")
    found = {
        record.getMessage(): {n: vars(record)[n] for n in FIELDS if n in vars(record)}
        for record in caplog.records
        if record.name == "shop"
    }
    whole = {
        "task_id": delivery.task.id, "key": "coroutine", "attempt": 1, "tenant": None, "worker_id": "w-2",
    }  # fmt: skip
    assert found["resizing cat.png"] == whole | {"key": "its own"}
    assert found["in a thread"] == whole
    assert found["2 items"] == {"key": "batch", "worker_id": "w-2"}
    assert found["outside"] == {}


async def test_frames_hide_the_texts(
    server: FakeServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U10, fault K1: with ``TASKQUEUE_LOG_ERRORS=frames``, no text of an error or of its cause is logged."""
    monkeypatch.setenv("TASKQUEUE_LOG_ERRORS", "frames")
    async with running(Worker(tasks, url=server.url)):
        peer = await server.welcomed()
        await peer.deliver(work({"secret": SECRET}, key="thread"))
        await peer.next(RetryFrame)
    assert SECRET not in caplog.text
    assert {"KeyError", "ValueError"} <= set(caplog.text.splitlines())
    assert "in _fail" in caplog.text


async def test_a_timeout_is_a_record(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    """U10: an attempt that its timeout ends is logged like any other failure, with the task's fields."""
    worker = Worker(url=server.url, worker_id="w-3")

    @worker.task("work", timeout=0.01)
    async def slow() -> None:
        await asyncio.sleep(PATIENCE)

    async with running(worker):
        peer = await server.welcomed()
        await peer.deliver(work())
        await peer.next(RetryFrame)
    (record,) = (record for record in caplog.records if "failed" in record.getMessage())
    assert vars(record)["worker_id"] == "w-3"
    assert "timeout after 0.01 s" in caplog.text


async def test_a_failed_item_of_a_batch_is_a_record(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """U10: an exception in the list that a batch handler returns is logged as the failure of its task."""
    worker = Worker(url=server.url, worker_id="w-4")

    @worker.task("work", batch=2)
    async def some(items: list[int]) -> list[int | Exception]:
        return [n or ValueError("zero") for n in items]

    async with running(worker):
        peer = await server.welcomed()
        await peer.deliver(failing := work(0), work(1))
        await peer.next(RetryFrame)
    (record,) = (record for record in caplog.records if "failed" in record.getMessage())
    assert vars(record)["task_id"] == failing.task.id
    assert "ValueError: zero" in caplog.text


def _rejecting(kind: str, url: str) -> Worker:
    """Return a worker whose handler ends a task in one way, always with the secret in a text."""
    worker = Worker(url=url, worker_id="w-5")

    def raises(n: int) -> object:
        match kind:
            case "raised":
                raise Reject("bad_address", SECRET)
            case "returned":
                return Reject("bad_address", SECRET)
            case "rule":
                raise KeyError(SECRET)
            case "result":
                return float("nan")
            case "snooze":
                raise Snooze(5)
            case "retry":
                raise Retry(error=SECRET)
        return n

    rules: ErrorRules | None = {KeyError: Reject("bad_address")} if kind == "rule" else None
    worker.task("work", on_error=rules)(raises)

    @worker.task("batch", batch=2)
    async def some(items: list[int]) -> list[object]:
        return [Reject("bad_address", SECRET) for _ in items]

    return worker


_ENDS: dict[str, tuple[str, Any]] = {
    "raised": (r"was rejected: bad_address \(hunter2\)", DeadLetterFrame),
    "returned": (r"was rejected: bad_address \(hunter2\)", DeadLetterFrame),
    "rule": (r"was rejected: bad_address \(KeyError: 'hunter2'\)", DeadLetterFrame),
    "result": (
        r"was rejected: invalid_result \(result: got NaN or an infinity.*\)",
        DeadLetterFrame,
    ),
    "payload": (r"was rejected: invalid_payload \(payload should be .*\)", DeadLetterFrame),
    "batch": (r"was rejected: bad_address \(hunter2\)", DeadLetterFrame),
    "snooze": (r"is put off by 5 s", RetryFrame),
    "retry": (r"asks for a retry \(attempt 1\): hunter2", RetryFrame),
}


_REASONS = ("bad_address", "invalid_result", "invalid_payload")


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("kind", _ENDS)
async def test_each_end_without_a_success_is_a_record(
    server: FakeServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    hidden: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """U10, fault K1: a rejection, a retry and a snooze are one record each, with the task's fields.

    With ``TASKQUEUE_LOG_ERRORS=frames``, texts are left out.
    """
    caplog.set_level(logging.INFO, logger="taskqueue.worker")
    if hidden:
        monkeypatch.setenv("TASKQUEUE_LOG_ERRORS", "frames")
    pattern, frame = _ENDS[kind]
    delivery = work(
        "no number" if kind == "payload" else 1, key="batch" if kind == "batch" else "work"
    )
    async with running(_rejecting(kind, server.url)):
        peer = await server.welcomed()
        await peer.deliver(delivery)
        await peer.next(frame)
    (record,) = (each for each in caplog.records if each.getMessage().startswith("task "))
    assert vars(record)["task_id"] == delivery.task.id
    assert vars(record)["worker_id"] == "w-5"
    shown = record.getMessage()
    start = f"task {delivery.task.id} of {delivery.task.key} "
    if hidden:
        assert SECRET not in shown
        assert shown in {start + "was rejected: " + reason for reason in _REASONS} | {
            start + "is put off by 5 s",
            start + "asks for a retry (attempt 1)",
        }
    else:
        assert re.fullmatch(re.escape(start) + pattern, shown)


@pytest.mark.parametrize("form", ["json", "text", "people"])
def test_a_failure_in_each_form(form: str) -> None:
    """U10: a traceback is indented lines on a terminal, and one field of one line elsewhere."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter(for_people=form == "people", as_json=form == "json"))
    with pytest.raises(ValueError, match="invalid") as raised:
        int("no\n00:00:00 info    forged")
    info: Any = TaskLog("w").exc_info(raised.value)
    record = logging.getLogger("shop").makeRecord(
        "shop", logging.WARNING, "", 0, "failed", (), info, extra={"event": "mine"}
    )
    handler.handle(record)
    first, *more = stream.getvalue().splitlines()
    assert "failed" in first
    assert "mine" in first
    if form == "people":
        assert more[0] == "    Traceback (most recent call last):"
        assert all(line.startswith("    ") for line in more)
    else:
        assert not more
        assert "Traceback" in first


@pytest.mark.parametrize("form", ["json", "text", "people"])
@pytest.mark.parametrize("size", [10, LIMITS.traceback])
async def test_a_failure_is_rendered_once(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, form: str, size: int
) -> None:
    """U10: the log shows the text of the traceback that is stored, in each form; only if that is cut, the whole one."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter(for_people=form == "people", as_json=form == "json"))
    rendered: list[object] = []
    init = traceback.TracebackException.__init__

    def counting(self: traceback.TracebackException, *args: Any, **kwargs: Any) -> None:
        rendered.append(args)
        init(self, *args, **kwargs)

    monkeypatch.setattr(traceback.TracebackException, "__init__", counting)
    monkeypatch.setattr(logging.getLogger("taskqueue.worker"), "handlers", [handler])
    monkeypatch.setattr(logging.getLogger("taskqueue.worker"), "propagate", False)
    worker = Worker(url=server.url)

    @worker.task("work")
    async def fail() -> None:
        raise ValueError("x" * size)

    async with running(worker):
        peer = await server.accept()
        await peer.welcome(features=[Feature.TRACEBACKS])
        await peer.deliver(work(None))
        stored = (await peer.next(RetryFrame)).traceback
    assert stored is not None
    is_cut = size == LIMITS.traceback
    assert len(rendered) == (2 if is_cut else 1)
    assert stored.startswith("Traceback") is not is_cut
    shown = stream.getvalue()
    assert "Traceback" in shown
    assert "ValueError: " + "x" * size in shown
    if form == "json":
        (line,) = map(json.loads, shown.splitlines())
        assert line["exception"].endswith(stored.rstrip()[-size:])
        assert line["exception"] == stored.rstrip() or is_cut


@pytest.mark.parametrize("kind", ["coroutine", "thread"])
async def test_each_call_has_a_context_of_its_own(server: FakeServer, kind: str) -> None:
    """U10: what a handler sets in its context, such as fields for structlog, is not seen by the next call."""
    order: ContextVar[int] = ContextVar("order", default=0)
    worker = Worker(url=server.url, concurrency=1, prefetch=1)
    seen: list[int] = []

    def note(n: int) -> None:
        seen.append(order.get())
        order.set(n)

    async def note_in_the_loop(n: int) -> None:
        note(n)

    worker.task("work")(note_in_the_loop if kind == "coroutine" else note)
    async with running(worker):
        peer = await server.welcomed()
        await peer.deliver(work(1), work(2))
        while len(peer.settled()) < 2:
            await peer.next(AckFrame)
    assert seen == [0, 0]

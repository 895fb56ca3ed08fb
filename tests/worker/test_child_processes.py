"""Tasks with ``run="process"``: child processes, which a timeout, a cancel or a lost lease ends."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from taskqueue_core import Queue, TaskDead, Tasks
from taskqueue_core.assembly import open_backend
from taskqueue_core.config import Settings
from taskqueue_core.errors import ConfigurationError
from taskqueue_core.protocol.frames import (
    AckFrame,
    Credit,
    DeadLetterFrame,
    Progress,
    RedeliverFrame,
    RetryFrame,
    Revoke,
)
from taskqueue_memory import MemoryBackend
from taskqueue_server import ServerProcess
from taskqueue_worker import LocalWorker, Worker
from taskqueue_worker.child_processes import ChildProcessEnded
from tests.server.in_thread import in_thread
from tests.worker.crunching import coroutine, publish_in_process, publish_sync_in_process, tasks
from tests.worker.fake import PATIENCE, FakeServer, Peer, running, work
from tests.worker.local import serving, until
from tests.worker.test_worker_options import command


def gone(pid: int) -> bool:
    """Return whether a process has ended and its parent knows it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def result(peer: Peer, key: str, payload: object) -> Any:
    """Run a task and return its result."""
    await peer.deliver(delivery := work(payload, key=key))
    ack = await peer.next(AckFrame)
    return json.loads(bytes(ack.results[delivery.receipt]))


async def test_tasks_run_in_a_child(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    """U8, U9: functions and coroutines run in one child process after the other, with a lifespan of its own."""
    caplog.set_level(logging.INFO)
    async with running(Worker(tasks, url=server.url, concurrency=1)):
        peer = await server.welcomed()
        first, own_state = await result(peer, "pid", {"day": "2026-05-04"})
        assert own_state
        assert first != os.getpid()
        assert await result(peer, "coroutine", {}) == first
    assert gone(first)
    assert caplog.messages.count(f"closed in {first}") == 1


async def test_tasks_at_the_same_time(server: FakeServer) -> None:
    """U8: each process runs one task at a time, and a slot of the worker has one process."""
    async with running(Worker(tasks, url=server.url, concurrency=2)):
        peer = await server.welcomed()
        await peer.deliver(work({}, key="hang"), work({}, key="hang"))
        pids = {int((await peer.next(Progress)).value) for _ in range(2)}
        assert len(pids) == 2


async def test_a_wait_in_a_process(server: FakeServer) -> None:
    """U7: a task in a child process cannot lend its slot, so a wait for another task is refused."""
    async with running(Worker(tasks, url=server.url, concurrency=1)):
        peer = await server.welcomed()
        assert await result(peer, "wait", {}) == "refused"


async def test_a_timeout_ends_the_work(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """U8: after the timeout the process is killed, the attempt has failed, and the slot is free."""
    async with running(Worker(tasks, url=server.url, concurrency=1)):
        peer = await server.welcomed()
        await peer.deliver(work({}, key="hang_briefly"))
        pid = int((await peer.next(Progress)).value)
        assert (await peer.next(RetryFrame)).error == "timeout after 0.2 s"
        await peer.next(Credit)
        assert (await result(peer, "pid", {}))[0] != pid
        await until(lambda: gone(pid))
    assert "failed (attempt 1)" in caplog.text


async def test_a_revoked_task_ends(server: FakeServer) -> None:
    """U8: a cancel, or a lost lease, kills the process, without an outcome, and the slot is free."""
    async with running(Worker(tasks, url=server.url, concurrency=1)):
        peer = await server.welcomed()
        await peer.deliver(lost := work({}, key="hang"))
        pid = int((await peer.next(Progress)).value)
        await peer.send(Revoke(receipts=[lost.receipt]))
        await peer.next(Credit)
        assert (await result(peer, "pid", {}))[0] != pid
        await until(lambda: gone(pid))
        assert lost.receipt not in peer.settled()


async def test_stopping_releases_the_task(server: FakeServer) -> None:
    """U8: a worker that stops at once kills its processes, and releases their tasks."""
    worker = Worker(tasks, url=server.url, concurrency=1)
    async with running(worker):
        peer = await server.welcomed()
        await peer.deliver(task := work({}, key="hang"))
        pid = int((await peer.next(Progress)).value)
        worker.stop(now=True)
        assert (await peer.next(RedeliverFrame)).receipts == [task.receipt]
    assert gone(pid)


async def test_a_worker_that_dies_takes_its_processes_along(
    server: FakeServer, tmp_path: Path
) -> None:
    """U8: a process ends when its worker was killed, even in the middle of a task that never returns."""
    (tmp_path / "shop.py").write_text(
        "from tests.worker.crunching import tasks\n__all__ = ['tasks']\n"
    )
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    async with command(tmp_path, "--url", server.url, environment=environment) as child:
        peer = await server.welcomed()
        await peer.deliver(work({}, key="hang"))
        pid = int((await peer.next(Progress)).value)
        child.kill()
        await until(lambda: gone(pid))


@pytest.mark.parametrize(
    ("how", "said"),
    [("exit", "exit code 9"), ("sys.exit", "exit code 7"), ("crash", "killed by SIGSEGV")],
)
async def test_a_process_that_dies(server: FakeServer, how: str, said: str) -> None:
    """U8: a process that ends is a failure of its attempt that says how it ended; the worker continues."""
    async with running(Worker(tasks, url=server.url, concurrency=1)):
        peer = await server.welcomed()
        await peer.deliver(work({"how": how}, key="die"))
        error = (await peer.next(RetryFrame)).error
        assert error is not None
        assert error.startswith("ChildProcessEnded: the child process")
        assert said in error
        await peer.next(Credit)
        assert await result(peer, "coroutine", {}) > 0


@pytest.mark.parametrize("end", [True, False])
async def test_processes_of_a_task(server: FakeServer, tmp_path: Path, end: bool) -> None:  # noqa: FBT001
    """U8: a process that dies or is killed is noticed, and those that its task has started end with it."""
    os.mkfifo(pipe := tmp_path / "pipe")
    async with running(Worker(tasks, url=server.url, concurrency=1)):
        peer = await server.welcomed()
        await peer.deliver(task := work({"path": str(pipe), "end": end}, key="start_a_process"))
        with await asyncio.to_thread(pipe.open) as opened:
            if end:
                error = (await peer.next(RetryFrame)).error
                assert error == "ChildProcessEnded: the child process ended with exit code 7"
            else:
                assert await asyncio.to_thread(opened.readline) == "started\n"
                await peer.send(Revoke(receipts=[task.receipt]))
            await peer.next(Credit)
            async with asyncio.timeout(PATIENCE):
                assert await asyncio.to_thread(opened.read) in {"", "started\n"}


async def test_a_rule_for_the_timeout(server: FakeServer) -> None:
    """U5, U8: a rule for ``TimeoutError`` decides what becomes of an attempt whose process the timeout kills."""
    async with running(Worker(tasks, url=server.url, concurrency=1)):
        peer = await server.welcomed()
        await peer.deliver(work({}, key="hang_in_vain"))
        frame = await peer.next(DeadLetterFrame)
        assert (frame.reason, frame.error) == ("too_slow", "timeout after 0.2 s")
        await peer.next(Credit)


async def test_processes_are_replaced(server: FakeServer) -> None:
    """U8: with ``tasks_per_child``, a process is replaced after that many tasks."""
    worker = Worker(tasks, url=server.url, concurrency=1)
    worker.configure(tasks_per_child=2)
    async with running(worker):
        peer = await server.welcomed()
        pids = [await result(peer, "coroutine", {}) for _ in range(4)]
    assert pids[0] == pids[1] != pids[2] == pids[3]
    with pytest.raises(ConfigurationError, match="tasks_per_child"):
        worker.configure(tasks_per_child=0)


async def test_outcomes_and_records(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    """U8, U10: outcomes arrive as from any handler; the records of a child are handled by the worker's logging.

    They carry the fields of the task and of the application, and a failure its traceback.
    """
    caplog.set_level(logging.INFO)
    async with running(Worker(tasks, url=server.url, worker_id="w-1")):
        peer = await server.welcomed()
        await peer.deliver(work({"how": "retry"}, key="end"))
        retry = await peer.next(RetryFrame)
        assert (retry.delay, retry.error) == (5, "later")
        await peer.deliver(work({"how": "reject"}, key="end"))
        assert (await peer.next(DeadLetterFrame)).reason == "bad"
        await peer.deliver(failing := work({"how": "error"}, key="end"))
        assert (await peer.next(RetryFrame)).error == "ValueError: error"
    mine = [record for record in caplog.records if record.name == "shop"]
    assert [record.getMessage() for record in mine][:3] == [
        f"ending by {how}" for how in ("retry", "reject", "error")
    ]
    fields = vars(mine[2])
    assert (fields["task_id"], fields["key"]) == (failing.task.id, "end")
    assert (fields["worker_id"], fields["attempt"], fields["tenant"]) == ("w-1", 1, None)
    assert (fields["width"], fields["way"]) == (3, ["error"])
    (failed,) = (record for record in caplog.records if "failed" in record.getMessage())
    assert vars(failed)["task_id"] == failing.task.id
    assert "in end\n    raise ValueError(how)" in caplog.text
    assert "taskqueue_worker" not in (failed.exc_text or "")


async def test_any_record(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    """U8, U10: a record that cannot be sent as it is neither raises in the task nor is lost.

    Values that MessagePack cannot express become text, and lone surrogates are replaced.
    """
    caplog.set_level(logging.INFO)
    async with running(Worker(tasks, url=server.url)):
        peer = await server.welcomed()
        assert await result(peer, "log_anything", {}) == ["done"]
    plain, record, raw = [each for each in caplog.records if each.name == "shop"][:3]
    assert vars(raw)["raw"].startswith("<msgspec.Raw object")
    assert (plain.getMessage(), record.getMessage()) == ("{'plain': 'dict'}", "?")
    fields = vars(record)
    assert fields["many"] == [str(2**70), "?"]
    assert fields["endless"] == ["[[...]]"]
    assert fields["bad"] == "<_NoText without a text>"


async def test_texts_that_utf_8_cannot_encode(server: FakeServer) -> None:
    """U8: an error, a progress or a result with a lone surrogate gives an outcome, and the slot is free."""
    async with running(Worker(tasks, url=server.url, concurrency=1)):
        peer = await server.welcomed()
        await peer.deliver(work({"text": "bad "}, key="fail_with"))
        assert (await peer.next(RetryFrame)).error == "ValueError: bad ?"
        await peer.deliver(work({"text": "bad "}, key="progress_with"))
        assert (await peer.next(DeadLetterFrame)).reason == "invalid_result"
        assert await result(peer, "coroutine", {}) > 0


async def test_a_filter_that_raises(
    server: FakeServer, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """U8, U10: a logging filter of the worker that raises on a child's record does not end the attempt."""
    caplog.set_level(logging.INFO)

    def refuse(_record: logging.LogRecord) -> bool:
        raise ZeroDivisionError

    logger = logging.getLogger("shop")
    logger.addFilter(refuse)
    try:
        async with running(Worker(tasks, url=server.url)):
            peer = await server.welcomed()
            await peer.deliver(work({"how": "retry"}, key="end"))
            assert (await peer.next(RetryFrame)).error == "later"
    finally:
        logger.removeFilter(refuse)
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_options_are_checked() -> None:
    """U8: a value of ``run`` that does not exist or does not fit the function is an error at the declaration."""
    new = Tasks()
    with pytest.raises(ConfigurationError, match="'auto', 'thread' or 'process'"):
        new.task("a", run="gpu")  # type: ignore[call-overload]
    with pytest.raises(ConfigurationError, match="one task at a time"):
        new.task("a", run="process", batch=2)

    async def coroutine() -> None: ...

    with pytest.raises(ConfigurationError, match="cannot run in a thread"):
        new.task("a", run="thread")(coroutine)
    assert ChildProcessEnded.code == "child_process_ended"


async def test_publishing_in_a_child() -> None:
    """U8, U9: tasks in a child process publish through a connection like the worker's, async and blocking."""
    with in_thread(ServerProcess(MemoryBackend(), Settings(port=0))) as at:
        backend = open_backend("server", server={"url": at.url})
        async with (
            aclosing(backend),
            tasks.connect(Queue(backend)),
            running(Worker(tasks, url=at.url)),
        ):
            first = await publish_in_process.publish()
            assert await first.result(timeout=PATIENCE) == "from-a-child"
            second = await publish_sync_in_process.publish()
            assert await second.result(timeout=PATIENCE) == "from-a-thread"
            for name in ("from-a-child", "from-a-thread"):
                assert await coroutine.handle(name).result(timeout=PATIENCE) != os.getpid()


async def test_no_connection_to_a_store_in_the_process() -> None:
    """U8, U9: without a store that processes share, publishing in a child is an error that says what to do."""
    backend = MemoryBackend()
    async with tasks.connect(Queue(backend)), serving(LocalWorker(tasks, backend=backend)):
        handle = await publish_in_process.using(max_attempts=1).publish()
        with pytest.raises(TaskDead, match="needs a connection"):
            await handle.result(timeout=PATIENCE)

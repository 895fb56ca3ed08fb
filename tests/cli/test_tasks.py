"""The commands ``taskqueue cancel``, ``purge``, ``workers`` and ``result --wait``."""

import asyncio
from typing import Any

import pytest

from taskqueue_core.tasks import Task
from tests.cli.conftest import Cli
from tests.cli.shared import Shared


@pytest.fixture
def filled(store: Shared) -> Shared:
    """A queue with two waiting tasks and one scheduled task."""
    tasks = (Task(key="k", id="a"), Task(key="k", id="b"), Task(key="k", id="c", not_before=2e9))
    asyncio.run(store.publisher.publish(*tasks))
    return store


def test_a_task_is_cancelled(cli: Cli, filled: Shared) -> None:
    """U8: cancel ends a live task, may be repeated, and refuses a task that has ended otherwise or is unknown."""
    assert cli("cancel", "k", "a", "--json").json == {"key": "k", "task_id": "a", "cancelled": True}
    again = cli("cancel", "k", "a")
    assert (again.code, "cancelled before" in again.out) == (0, True)

    async def finish() -> None:
        async with filled.subscribe(["k"], "c") as subscription:
            (delivery,) = (await subscription.receive(1, 0)).deliveries
            await subscription.ack(delivery)

    asyncio.run(finish())
    done = cli("cancel", "k", "b", "--json")
    assert (done.code, done.json["error"]["code"]) == (1, "not_cancelled")
    assert "done" in done.err
    assert cli("cancel", "k", "missing", "--json").json["error"]["code"] == "not_found"


def test_a_task_is_rescheduled(cli: Cli, filled: Shared) -> None:
    """U6: reschedule gives a waiting or scheduled task another time; a running or unknown task is an error."""
    moved = cli("reschedule", "k", "a", "--delay", "3600", "--json").json
    assert (moved["key"], moved["task_id"]) == ("k", "a")
    assert abs(moved["at"] - filled.now() - 3600) < 60
    assert cli("reschedule", "k", "c", "--delay", "0").code == 0

    async def receive() -> None:
        async with filled.subscribe(["k"], "c") as subscription:
            received = await subscription.receive(5, 0)
            assert {delivery.task.id for delivery in received.deliveries} == {"b", "c"}

    asyncio.run(receive())
    released = cli("reschedule", "k", "b", "--delay", "5", "--json")
    assert (released.code, released.json["error"]["code"]) == (1, "not_rescheduled")
    unknown = cli("reschedule", "k", "missing", "--delay", "5", "--json")
    assert unknown.json["error"]["code"] == "not_found"
    assert cli("reschedule", "k", "a").code == 2
    assert cli("reschedule", "k", "a", "--delay", "-1").code == 2


UNKNOWN_QUEUE = [
    (("status", "male", "a"), "not_found"),
    (("result", "male", "a"), "no_result"),
    (("cancel", "male", "a"), "not_found"),
    (("reschedule", "male", "a", "--delay", "5"), "not_found"),
    (("dlq", "list", "male"), "not_found"),
    (("dlq", "show", "male", "a"), "not_found"),
    (("dlq", "redrive", "male", "a"), "not_found"),
    (("dlq", "discard", "male", "--all", "--yes"), "not_found"),
]


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize(
    ("words", "code"), UNKNOWN_QUEUE, ids=[" ".join(words[:2]) for words, _ in UNKNOWN_QUEUE]
)
def test_an_unknown_queue_is_named(
    cli: Cli, store: Shared, words: tuple[str, ...], code: str
) -> None:
    """U8: a command for a queue that does not exist names it, and the existing queues, the most similar one first."""
    asyncio.run(store.publisher.publish(Task(key="mail")))
    done = cli(*words, "--json")
    assert (done.code, done.json["error"]["code"]) == (1, code)
    named = "there is no queue 'male' among those that this command can see: mail, k"
    assert named in done.json["error"]["detail"]
    right = ["mail" if word == "male" else word for word in words]
    assert "there is no queue" not in cli(*right).err


def test_a_purge_needs_the_name_again(cli: Cli, filled: Shared) -> None:
    """U8: purge cancels waiting and scheduled tasks only if the name is repeated; a mistyped name is an error."""
    assert cli("purge", "k").code == 2
    assert cli("purge", "k", "--confirm", "other").code == 2
    assert asyncio.run(filled.control.ledger("k")).waiting == 2
    assert cli("purge", "k", "--confirm", "k", "--json").json == {"key": "k", "count": 3}
    assert asyncio.run(filled.control.ledger("k")).cancelled == 3
    unknown = cli("purge", "kk", "--confirm", "kk")
    assert (unknown.code, "an existing queue (k)" in unknown.err) == (2, True)


def test_workers_are_listed(cli: Cli, filled: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """U8: workers lists each connected worker with its queues and running tasks; without one it says what to do."""
    assert "taskqueue worker" in cli("workers").out
    assert cli("workers", "--json").json == []
    workers = filled.control.workers

    async def connected() -> Any:
        async with filled.subscribe(["k"], "worker-1") as subscription:
            await subscription.receive(1, 0)
            return await workers()

    monkeypatch.setattr(filled.control, "workers", connected)
    (worker,) = cli("workers", "--json").json
    assert (worker["worker_id"], worker["keys"], worker["in_flight"]) == ("worker-1", ["k"], 1)
    assert "worker-1" in cli("workers").out


def test_a_result_is_awaited(cli: Cli, filled: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """U6: result --wait returns once the task ends, stops after the time, and does not wait for an unknown id."""
    polls = 0
    statuses = filled.control.statuses

    async def counted(key: str, *ids: str) -> Any:
        nonlocal polls
        polls += 1
        if polls == 2:  # the task ends while the command waits
            async with filled.subscribe(["k"], "c") as subscription:
                (delivery,) = (await subscription.receive(1, 0)).deliveries
                await subscription.ack(delivery, results=(b"7",))
        return await statuses(key, *ids)

    monkeypatch.setattr(filled.control, "statuses", counted)
    assert cli("result", "k", "a", "--wait", "60").out == "7\n"
    assert polls == 2
    unknown = cli("result", "k", "missing", "--wait", "60")
    assert (unknown.code, polls) == (1, 3)
    late = cli("result", "k", "b", "--wait", "0.01")
    assert (late.code, "waiting, still after 0.01 s" in late.err) == (1, True)
    assert "--wait SECONDS" in cli("result", "k", "b").err

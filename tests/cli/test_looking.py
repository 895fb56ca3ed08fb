"""The commands ``taskqueue stats``, ``status``, ``result`` and ``dlq``."""

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from taskqueue_cli.output import SafeConsole, make_table
from taskqueue_core.retry import EXHAUSTED
from taskqueue_core.tasks import Ledger, Task
from tests.cli.conftest import Cli
from tests.cli.shared import Shared

TRACEBACK = "Traceback (most recent call last):\n  somewhere\nValueError: no\n"


@pytest.fixture
def worked(store: Shared) -> Shared:
    """A queue with one done, three dead and one waiting task, and another queue with one waiting task."""

    async def work() -> None:
        tasks = [Task(key="k", id=task_id) for task_id in ("good", "d1", "d2", "d3", "new")]
        await store.publisher.publish(*tasks, Task(key="other", id="o"))
        async with store.subscribe(["k"], "c") as subscription:
            good, *bad = (await subscription.receive(4, 0)).deliveries
            await subscription.ack(good, results=(b'{"x":  1.50}',))
            for delivery in bad:
                await subscription.dead_letter(delivery, EXHAUSTED, "ValueError: no", TRACEBACK)

    asyncio.run(work())
    return store


@pytest.mark.usefixtures("worked")
def test_stats_show_every_ledger(cli: Cli) -> None:
    """Law 1: stats shows the ledger of each queue, and exits with 0 if all of them balance."""
    done = cli("stats", "--json")
    assert done.code == 0
    first, second = done.json
    assert (first["key"], second["key"]) == ("k", "other")
    expected = Ledger(published=5, waiting=1, done=1, dead=3)
    assert first["ledger"] == msgspec.to_builtins(expected) | {"balanced": True}
    assert cli("stats", "other", "--json").json == [second]
    shown = cli("stats").out
    assert shown.count("✔") == 3
    assert "Zero in all queues: blocked, scheduled, expired, cancelled, discarded." in shown


@pytest.mark.usefixtures("worked")
def test_stats_of_an_unknown_queue(cli: Cli) -> None:
    """Stats of an unknown queue is an error that names the existing queues, not a row of zeros."""
    asked = cli("stats", "typo", "--json")
    assert asked.code == 2
    assert "an existing queue (k, other)" in asked.json["error"]["detail"]


def test_stats_without_queues_say_how_to_begin(cli: Cli) -> None:
    """Stats of an empty store is not an error, and says how to publish a task."""
    assert "taskqueue publish" in cli("stats").out
    assert cli("stats", "--json").json == []


@pytest.mark.usefixtures("worked")
def test_an_imbalance_is_loud(cli: Cli, store: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 1: if a ledger does not balance, stats shows the difference and exits with 1."""
    right = store.control.stats

    async def wrong(key: str) -> Any:
        stats = await right(key)
        ledger = msgspec.structs.replace(stats.ledger, published=stats.ledger.published + 2)
        return msgspec.structs.replace(stats, ledger=ledger)

    monkeypatch.setattr(store.control, "stats", wrong)
    done = cli("stats")
    assert done.code == 1
    assert "off by +2" in done.out
    assert cli("stats", "--json").code == 1


@pytest.mark.usefixtures("worked")
def test_status_gives_the_reason_of_the_end(cli: Cli) -> None:
    """C16: the status of a task without attempts left names this reason."""
    done = cli("status", "k", "d1", "--json")
    assert done.code == 0
    assert (done.json["state"], done.json["attempt"]) == ("dead", 1)
    assert EXHAUSTED in done.json["error"]
    assert done.json["last_failure"]["error"] == "ValueError: no"
    shown = cli("status", "k", "d1").out
    assert "dead" in shown
    assert f"reason        {EXHAUSTED}" in shown
    assert "attempt 1: ValueError: no" in shown
    cli("publish", "k", "1", "--id", "later", "--delay", "3600")
    assert cli("status", "k", "later", "--json").json["due_at"] > 1_000_000_000
    assert "due  " in cli("status", "k", "later").out
    assert "there is no queue 'typo'" in cli("status", "typo", "d1").err
    missing = cli("status", "k", "nobody", "--json")
    assert (missing.code, missing.json["error"]["code"]) == (1, "not_found")


@pytest.mark.usefixtures("worked")
def test_a_result_is_printed_as_it_was_stored(cli: Cli) -> None:
    """A result is printed exactly as stored; if there is none, the error names the state of the task."""
    assert cli("result", "k", "good").out == '{"x":  1.50}\n'
    assert cli("result", "k", "good", "--json").json == {
        "key": "k",
        "task_id": "good",
        "result": {"x": 1.5},
    }
    done = cli("result", "k", "new", "--json")
    assert (done.code, done.json["error"]["code"]) == (1, "no_result")
    assert "waiting" in done.err
    assert cli("result", "k", "nobody").code == 1


@pytest.mark.usefixtures("worked")
def test_dead_letters_are_listed_with_reason_and_error(cli: Cli) -> None:
    """C16, U10: a dead letter is listed with its id, time, reason and last error, and shown with its traceback."""
    done = cli("dlq", "list", "k", "--json")
    assert [letter["task"]["id"] for letter in done.json] == ["d1", "d2", "d3"]
    letter = done.json[0]
    assert letter["reason"] == EXHAUSTED
    assert letter["history"][-1]["error"] == "ValueError: no"
    assert letter["failed_at"] > 1_000_000_000
    assert cli("dlq", "show", "k", "d2", "--json").json["task"]["id"] == "d2"
    for shown in (cli("dlq", "list", "k"), cli("dlq", "show", "k", "d1")):
        assert shown.code == 0
        assert EXHAUSTED in shown.out
        assert "ValueError: no" in shown.out
    assert letter["history"][-1]["traceback"] == TRACEBACK
    assert all(line in cli("dlq", "show", "k", "d1").out for line in TRACEBACK.splitlines())
    assert len(cli("dlq", "list", "k", "--limit", "2", "--json").json) == 2
    assert "No dead letters" in cli("dlq", "list", "other").out
    assert cli("dlq", "show", "k", "good").code == 1
    assert cli("dlq", "list", "--json").json == [{"key": "k", "dead": 3}]
    (row,) = (line for line in cli("dlq", "list").out.splitlines() if "k" in line.split())
    assert row.split() == ["k", "3"]


def test_a_pipe_gets_whole_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """U3: a table that is not for a terminal is not wrapped, so that a program can read its lines."""
    monkeypatch.delenv("COLUMNS", raising=False)
    name = "n" * 300
    with (tmp_path / "out").open("w+") as file:
        table = make_table("task", texts=("queue",))
        table.add_row(name, name)
        SafeConsole(file=file).print(table)
        file.seek(0)
        assert [name, name] in [line.split() for line in file]


def test_dead_letters_are_redriven_and_discarded(cli: Cli, worked: Shared) -> None:
    """Dead letters are redriven and discarded by id or all at once, and the ledger counts both."""
    assert cli("dlq", "redrive", "k", "d1", "nobody", "--json").json == {"count": 1}
    assert cli("dlq", "discard", "k", "d2", "--yes", "--json").json == {"count": 1}
    assert "1 dead letter" in cli("dlq", "redrive", "k", "--all", "--yes").out
    ledger = asyncio.run(worked.control.ledger("k"))
    assert (ledger.waiting, ledger.dead, ledger.discarded) == (3, 0, 1)
    assert ledger.balanced


def test_dead_letters_are_chosen_by_what_they_say(cli: Cli, worked: Shared) -> None:
    """C17: dead letters can be selected by reason, error and age; conditions are combined with "and"."""
    assert cli("dlq", "redrive", "k", "--error", "TypeError", "--json").json == {"count": 0}
    assert cli("dlq", "redrive", "k", "--older-than", "3600", "--json").json == {"count": 0}
    words = ("--error", "ValueError", "--older-than", "0", "--reason")
    assert cli("dlq", "discard", "k", *words, "other", "--yes", "--json").json == {"count": 0}
    assert cli("dlq", "redrive", "k", *words, EXHAUSTED, "--json").json == {"count": 3}
    assert asyncio.run(worked.control.ledger("k")).dead == 0
    done = cli("dlq", "redrive", "k", "--older-than", "-1", "--json")
    assert (done.code, done.json["error"]["code"]) == (2, "invalid_input")


@pytest.mark.parametrize(
    "words",
    [
        ["redrive", "k"],
        ["redrive", "k", "d1", "--error", "x"],
        ["redrive", "k", "--all", "--reason", "x"],
        ["discard", "k", "--error", "x"],
        ["redrive", "k", "d1", "--all"],
        ["redrive", "k", "--all"],
        ["discard", "k", "d1"],
        ["discard", "k", "--all", "--json"],
    ],
)
def test_nothing_far_reaching_happens_unasked(
    words: list[str], cli: Cli, worked: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a terminal, a command on many dead letters requires --yes; otherwise it changes nothing."""
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False))
    assert cli("dlq", *words).code == 2
    assert asyncio.run(worked.control.ledger("k")).dead == 3


@pytest.mark.parametrize(("answer", "code", "left"), [("y\n", 0, 0), ("n\n", 1, 3)])
def test_a_person_is_asked(
    answer: str, code: int, left: int, cli: Cli, worked: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal, discarding dead letters asks for confirmation."""
    terminal = SimpleNamespace(isatty=lambda: True, readline=lambda: answer)
    monkeypatch.setattr(sys, "stdin", terminal)
    assert cli("dlq", "discard", "k", "--all").code == code
    assert asyncio.run(worked.control.ledger("k")).dead == left

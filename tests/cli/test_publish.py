"""The command ``taskqueue publish``."""

import asyncio
import io
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from taskqueue_core.tasks import Task
from tests.cli.conftest import Cli
from tests.cli.shared import Shared


def take(store: Shared, key: str = "k") -> list[Task]:
    """Return every waiting task, in order."""

    async def receive() -> list[Task]:
        async with store.subscribe([key], "c") as subscription:
            return [delivery.task for delivery in (await subscription.receive(100, 0)).deliveries]

    return asyncio.run(receive())


def test_a_publish_is_confirmed(cli: Cli) -> None:
    """D1: publish exits with 0 once the store has confirmed the task, and prints the confirmation."""
    done = cli("publish", "k", '{"n": 1}', "--id", "a", "--json")
    assert done.code == 0
    assert (done.json["key"], done.json["task_id"], done.json["status"]) == ("k", "a", "accepted")
    again = cli("publish", "k", '{"n": 1}', "--id", "a")
    assert again.code == 0
    assert "duplicate" in again.out


def test_another_payload_under_the_same_id_fails(cli: Cli) -> None:
    """Law 7: publishing an id again with another payload exits with 1 and reports the conflict in one line."""
    cli("publish", "k", "1", "--id", "a")
    done = cli("publish", "k", "2", "--id", "a", "--json")
    assert done.code == 1
    assert done.json["error"]["code"] == "id_conflict"
    assert done.err.count("\n") == 1


def test_every_option_reaches_the_task(store: Shared, cli: Cli) -> None:
    """Every option of the command reaches the task, and the payload is unchanged."""
    before = store.now()
    words = ["--priority", "7", "--tenant", "t", "--ordering-key", "o", "--max-attempts", "3"]
    words += ["--header", "a=b=c", "--header", "d=", "--expires-in", "60"]
    words += ["--tag", "user:42", "--tag", "nightly"]
    assert cli("publish", "k", '{"n": 1.0}', "--id", "x", *words).code == 0
    (task,) = take(store)
    assert task.payload == b'{"n": 1.0}'
    assert (task.id, task.priority, task.tenant, task.ordering_key) == ("x", 7, "t", "o")
    assert (task.max_attempts, task.headers) == (3, {"a": "b=c", "d": ""})
    assert task.tags == ("user:42", "nightly")
    assert task.deadline is not None
    assert before + 60 <= task.deadline <= store.now() + 60


def test_a_delayed_task_waits(store: Shared, cli: Cli) -> None:
    """Law 8: --delay counts from the time of the store."""
    before = store.now()
    assert cli("publish", "k", "--delay", "100").code == 0
    assert asyncio.run(store.control.ledger("k")).scheduled == 1
    assert take(store) == []
    assert store.now() - before < 50


@pytest.mark.parametrize("where", ["-", "@payload.json"])
def test_a_payload_may_come_from_elsewhere(
    where: str, store: Shared, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A payload can be read from stdin or from a file, without its trailing line break."""
    text = b'{"text": "\xc3\xa4"}\n'
    Path("payload.json").write_bytes(text)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text)))
    assert cli("publish", "k", where).code == 0
    assert take(store)[0].payload == text.strip()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["k", "{n: 1}"], "JSON"),
        (["k", "@missing"], "No such file"),
        (["k", "\udcff"], "JSON"),
        (["k/1", "1"], "key"),
        (["k", "1", "--id", "two words"], "id"),
        (["k", "1", "--header", "novalue"], "NAME=VALUE"),
        (["k", "1", "--tag", "x", "--tag", "x"], "tags: got the same tag twice"),
        (["k", "1", "--delay", "-1"], "delay"),
        (["k", "1", "--delay", "nan"], "delay"),
        (["k", "1", "--priority", "10"], "priority"),
        ([], "give a key"),
        (["k", "1", "--batch", "f"], "batch"),
    ],
)
def test_wrong_input_ends_with_2(words: list[str], said: str, cli: Cli, store: Shared) -> None:
    """Wrong input exits with 2, names the mistake and publishes nothing."""
    done = cli("publish", *words)
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err
    assert asyncio.run(store.control.queues()) == ()


def test_a_batch_publishes_every_line(cli: Cli, store: Shared) -> None:
    """D1: a batch exits with 0 once every line is stored.

    Lines without a key use the key of the command, and blank lines are skipped.
    """
    lines = [{"payload": {"n": n}, "id": f"t{n}", "priority": n % 10} for n in range(1203)]
    text = "\n".join(map(json.dumps, lines)) + '\n\n{"key": "other", "delay": 5}\n'
    Path("tasks.ndjson").write_text(text)
    done = cli("publish", "k", "--batch", "tasks.ndjson", "--json")
    assert done.code == 0
    assert (done.json["lines"], done.json["accepted"], done.json["faults"]) == (1204, 1204, [])
    assert asyncio.run(store.control.ledger("k")).published == 1203
    assert asyncio.run(store.control.ledger("other")).scheduled == 1
    again = cli("publish", "k", "--batch", "tasks.ndjson")
    assert again.code == 0
    assert "1,203 duplicate" in again.out


def test_a_bad_line_does_not_hold_up_the_others(cli: Cli, store: Shared) -> None:
    """C26: each line that was not stored is reported with its number and reason; all other lines are stored."""
    cli("publish", "k", "1", "--id", "taken")
    bad = [
        "nonsense",
        '{"key": "k", "payload": 1, "colour": "red"}',
        '{"payload": 1, "key": "a b"}',
        '{"payload": "' + "x" * 400_000 + '"}',
        '{"delay": 1, "not_before": 1}',
        '{"id": "taken", "payload": 2}',
    ]
    text = "\n".join(["{}", *bad, '{"id": "last"}'])
    Path("tasks.ndjson").write_text(text)
    done = cli("publish", "k", "--batch", "tasks.ndjson", "--json")
    assert done.code == 1
    told = done.json
    assert (told["lines"], told["accepted"], told["invalid"], told["conflict"]) == (8, 2, 5, 1)
    assert sorted(fault["line"] for fault in told["faults"]) == [2, 3, 4, 5, 6, 7]
    assert asyncio.run(store.control.ledger("k")).published == 3
    shown = cli("publish", "k", "--batch", "tasks.ndjson")
    assert "line 2: invalid" in shown.err
    assert "x" * 100 not in shown.err


def test_a_batch_that_cannot_be_read_ends_with_2(cli: Cli) -> None:
    """A batch file that does not exist exits with 2."""
    done = cli("publish", "--batch", "missing")
    assert done.code == 2
    assert "No such file" in done.err


def test_a_unique_key(store: Shared, cli: Cli) -> None:
    """U12: with a unique key, a second task is kept out, replaces the first one or is refused, as the option says."""
    assert cli("publish", "k", "1", "--id", "a", "--unique-key", "w").code == 0
    kept = cli("publish", "k", "2", "--id", "b", "--unique-key", "w", "--json")
    assert (kept.code, kept.json["status"], kept.json["existing_id"]) == (0, "duplicate", "a")
    refused = cli("publish", "k", "2", "--unique-key", "w", "--on-conflict", "refuse", "--json")
    assert (refused.code, refused.json["error"]["code"]) == (1, "not_unique")
    replaced = cli("publish", "k", "3", "--unique-key", "w", "--on-conflict", "replace")
    assert replaced.code == 0
    assert "replaced" in replaced.out
    assert "held by a" in replaced.out
    assert cli("publish", "k", "--on-conflict", "replace").code == 2
    wrong = cli("publish", "k", "--unique-key", "two words")
    assert (wrong.code, "unique.key" in wrong.err) == (2, True)
    (task,) = take(store)
    assert (task.id, task.payload) == ("a", b"3")


def test_unique_keys_in_a_file(store: Shared, cli: Cli, tmp_path: Path) -> None:
    """U12: the lines of a file may have unique keys; a line that replaced a task counts as stored.

    One with a debounce and an ordering key is named.
    """
    unique = {"key": "w", "on_conflict": "replace"}
    lines = [{"key": "k", "id": f"t{n}", "payload": n, "unique": unique} for n in range(3)]
    path = tmp_path / "tasks.ndjson"
    path.write_text("\n".join(map(json.dumps, lines)))
    done = cli("publish", "--batch", str(path), "--json")
    assert done.code == 0
    assert (done.json["accepted"], done.json["replaced"]) == (1, 2)
    debounced = {**unique, "debounce": {"seconds": 5}}
    path.write_text(json.dumps(lines[0] | {"ordering_key": "e", "unique": debounced}))
    done = cli("publish", "--batch", str(path), "--json")
    assert done.code == 1
    assert done.json["faults"][0]["detail"].startswith("debounce: ")
    (task,) = take(store)
    assert (task.id, task.payload) == ("t0", b"2")


def test_a_task_that_waits(cli: Cli) -> None:
    """U16: --after names the tasks to wait for; status and stats show a blocked task, and what holds it."""
    assert cli("publish", "k", "--id", "a").code == 0
    assert cli("publish", "k", "--id", "b", "--after", "k/a", "--when", "ended").code == 0
    both = cli("publish", "k", "--id", "c", "--after", "k/a", "--after", "k/b")
    assert both.code == 0, both.err
    shown = cli("status", "k", "c").out
    assert "blocked" in shown
    assert re.search(r"waits for +k/a, k/b *\n", shown)
    assert "blocked" in cli("stats", "k").out
    for words, told in (
        (("--after", "a"), "after"),
        (("--after", "k/a", "--after", "k/a"), "after.tasks"),
        (("--when", "failed"), "--when"),
        (("--after", "k/two words"), "id"),
    ):
        refused = cli("publish", "k", "--id", "d", *words)
        assert refused.code != 0
        assert told in refused.err


def test_tasks_that_wait_in_a_file(cli: Cli, tmp_path: Path) -> None:
    """U16: a line of a file may have ``after`` and ``batch``, also with as many parents as allowed."""
    parents = [{"key": "k", "task_id": f"{number:x<200}"} for number in range(1000)]
    lines = [
        {"key": "k", "id": "a"},
        {"key": "k", "id": "b", "after": {"tasks": parents}, "payload": "x" * 200_000},
        {"key": "k", "id": "c", "after": {"tasks": []}},
        {"key": "k", "id": "d", "batch": {"key": "k", "task_id": "d"}},
    ]
    file = tmp_path / "tasks.ndjson"
    file.write_text("\n".join(map(json.dumps, lines)))
    told = cli("publish", "--batch", str(file), "--json").json
    assert (told["accepted"], told["invalid"], told["faults"][0]["line"]) == (3, 1, 3)

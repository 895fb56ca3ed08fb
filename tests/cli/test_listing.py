"""``taskqueue tasks list``, and ``taskqueue status --detail``."""

from __future__ import annotations

import asyncio
import re
import shlex
import time

import pytest

from taskqueue_cli.output import console
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.tasks import Task
from taskqueue_remote.client import RemoteClock
from tests.cli.conftest import Cli
from tests.cli.shared import Shared


@pytest.fixture
def filled(cli: Cli, store: Shared) -> Shared:
    """A queue with tasks in several states, of which ``index`` names a tag."""
    assert cli("queue", "set", "mail", "--index", "user", "--keep-ended", "600").code == 0

    async def fill() -> None:
        ids = [f"{n:032x}" for n in range(4)]
        tags = ("user:42", "urgent")
        tasks = [Task(key="mail", id=i, tenant="acme", tags=tags, payload=b'{"to":1}') for i in ids]
        await store.publisher.publish(*tasks)
        await store.publisher.publish(Task(key="mail", id="later", not_before=store.now() + 7200))
        subscription = store.subscribe(["mail"], "worker-1")
        first, second = (await subscription.receive(2, 5)).deliveries
        await subscription.ack(first)
        error = "TimeoutError: the printer did not answer"
        await subscription.dead_letter(second, "max_attempts", error, traceback="File x\nline 7")

    asyncio.run(fill())
    return store


@pytest.mark.usefixtures("filled")
def test_tasks_are_listed(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """U18: a list has the columns that its tasks need, in 80 characters, and says how to go on; JSON has the cursor."""
    monkeypatch.setattr(console, "width", 80)
    found = cli("tasks", "list", "mail", "--tag", "user:42", "--limit", "3")
    assert found.code == 0
    lines = found.out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[1].split() == ["task", "attempt", "for", "state", "details"]
    assert f"{1:032x}" in found.out
    command = shlex.split(found.err.partition(": ")[2].strip())
    assert command[:2] == ["taskqueue", "tasks"]
    rest = cli(*command[1:])
    assert (f"{3:032x}" in rest.out, rest.err) == (True, "")
    newest = cli("tasks", "list", "mail", "--tag", "user:42", "--newest", "--all", "--json").json
    assert [int(task["task_id"], 16) for task in newest["tasks"]] == [3, 2, 1, 0]
    assert newest["next"] is None
    scheduled = cli("tasks", "list", "mail", "--state", "scheduled").out
    assert "due in" in scheduled
    assert re.search(r"later\s+1\s+2 h", scheduled)
    done = cli("tasks", "list", "mail", "--state", "done", "--worker", "worker-1", "--json").json
    assert [task["state"] for task in done["tasks"]] == ["done"]
    assert "No such tasks" in cli("tasks", "list", "mail", "--state", "blocked").out
    other = cli("tasks", "list", "mail", "--state", "dead", "--tenant", "other", "--json").json
    assert other == {"tasks": [], "next": None}


@pytest.mark.usefixtures("filled")
def test_tasks_of_a_worker_at_a_time(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """U18: what a worker ran is listed between two times, with the start of each; the next command has the same."""
    monkeypatch.setattr(console, "width", 80)
    words = ("tasks", "list", "mail", "--worker", "worker-1")
    for state in ("done", "dead"):
        found = cli(*words, "--state", state, "--since", "-1h")
        assert all(len(line) <= 80 for line in found.out.splitlines())
        assert "started (UTC)" in found.out
        assert re.search(r"\d\d:\d\d:\d\d", found.out)
        (task,) = cli(*words, "--state", state, "--since", "1m", "--json").json["tasks"]
        assert task["delivered_at"] <= task["updated_at"]
        assert cli(*words, "--state", state, "--until", "-1h", "--json").json["tasks"] == []
    assert cli("publish", "mail", "1", "--delay", "9000").code == 0
    page = cli("tasks", "list", "mail", "--state", "scheduled", "--since", "0s", "--limit", "1")
    command = shlex.split(page.err.partition(": ")[2].strip())
    assert "--since" in command
    rest = cli(*command[1:], "--json").json
    assert (len(rest["tasks"]), rest["next"]) == (1, None)
    assert rest["since"] == float(command[command.index("--since") + 1])


@pytest.mark.parametrize("elsewhere", [True, False], ids=["server", "store"])
def test_relative_times_are_of_the_store(
    cli: Cli, server: str, monkeypatch: pytest.MonkeyPatch, *, elsewhere: bool
) -> None:
    """U18: on a machine whose clock is 5 h ahead, ``0s`` is the present time of the store or of the server."""
    where = ["--server", server] if elsewhere else []
    assert cli("publish", "later", "1", "--delay", "9000", *where).code == 0
    right = time.time

    def wrong() -> float:
        return right() + 5 * 3600

    monkeypatch.setattr("time.time", wrong)
    monkeypatch.setattr(RemoteClock.__init__, "__defaults__", (time.monotonic, wrong))
    words = ("tasks", "list", "later", "--state", "scheduled", "--json", *where)
    found = [len(cli(*words, each, "0s").json["tasks"]) for each in ("--since", "--until")]
    assert found == [1, 0]
    assert cli(*words, "--since", "0s").json["since"] == pytest.approx(right(), abs=60)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["mail"], 2, "state: got none"),
        (["mail", "--tag", "job:1"], 2, "the queue's setting index (user)"),
        (["mail", "--state", "dead", "--after", "x"], 2, "after: got"),
        (["mail", "--state", "runs"], 2, "--state"),
        (["mail", "--state", "dead", "--since", "soon"], 2, "since: got text of length 4"),
        (["mail", "--state", "done", "--since", "1h", "--until", "2h"], 2, "until: got a time"),
        (["mail", "--state", "waiting", "--since", "1h"], 2, "scheduled, dead, done"),
        (["mial", "--state", "dead"], 1, "there is no queue 'mial' among those"),
    ],
)
@pytest.mark.usefixtures("filled")
def test_what_is_refused(cli: Cli, words: list[str], code: int, message: str) -> None:
    """U18: the error names the option and what to do."""
    refused = cli("tasks", "list", *words)
    assert refused.code == code
    assert message in " ".join(refused.err.split())


@pytest.mark.usefixtures("filled")
def test_a_task_in_detail(cli: Cli) -> None:
    """U20: ``status --detail`` shows the fields of a task, its worker, its failures with the traceback, its payload."""
    dead = f"{1:032x}"
    shown = cli("status", "mail", dead, "--detail").out
    for words in ("acme", "user:42 urgent", "on worker-1: TimeoutError", "line 7", '"to": 1'):
        assert words in shown
    found = cli("status", "mail", dead, "--detail", "--json").json
    assert (found["state"], found["detail"]["worker_id"]) == ("dead", "worker-1")
    assert found["detail"]["task"]["payload"] == {"to": 1}
    done = cli("status", "mail", f"{0:032x}", "--detail").out
    assert '"to"' not in done
    assert cli("status", "mail", "no", "--detail").code == 1


def test_erasure(cli: Cli, filled: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """U18, U21: `erase` counts the tasks with a tag; with the tag as confirmation it erases them, and records it."""
    counted = cli("erase", "mail", "user:42")
    assert "4 tasks with the tag user:42 in queue mail" in counted.out
    assert "--confirm user:42" in counted.out
    told = cli("erase", "mail", "user:42", "--json").json
    assert (told["erased"], told["count"], told["more"]) == (False, 4, False)
    assert told["tasks"] == {"done": 1, "dead": 1, "waiting": 2}
    wrong = cli("erase", "mail", "user:42", "--confirm", "user:4", "--json")
    assert (wrong.code, wrong.json["error"]["field"]) == (2, "--confirm")
    done = cli("erase", "mail", "user:42", "--confirm", "user:42")
    assert (done.code, "erased 4 tasks" in done.out) == (0, True)
    assert cli("tasks", "list", "mail", "--tag", "user:42", "--json").json["tasks"] == []
    again = cli("erase", "mail", "user:42", "--confirm", "user:42", "--json").json
    assert (again["erased"], again["count"], again["tasks"]) == (True, 0, {})
    assert cli("erase", "mail", "urgent", "--confirm", "urgent").code == 2
    entries = asyncio.run(filled.audit.entries(limit=4))
    actions = [(entry.action, entry.tasks, entry.details) for entry in entries]
    assert actions == [
        ("erase", 0, "tag=user:42"),
        ("begin to erase", None, "tag=user:42"),
        ("erase", 4, "tag=user:42"),
        ("begin to erase", None, "tag=user:42"),
    ]

    async def end(*_: object) -> None:
        raise BackendUnavailable("away")

    monkeypatch.setattr(filled.listing, "erase", end)  # as if the command was killed
    assert cli("erase", "mail", "user:42", "--confirm", "user:42").code != 0
    (entry,) = asyncio.run(filled.audit.entries(limit=1))
    assert (entry.action, entry.details) == ("begin to erase", "tag=user:42")

"""``taskqueue workflow``: list, show and cancel, on a shared store."""

from __future__ import annotations

import asyncio

from taskqueue_core import Queue, TaskRef, WorkflowStep
from taskqueue_core.consumer.expander import Expander
from tests.cli.conftest import Cli
from tests.cli.shared import Shared


def _put(store: Shared) -> None:
    steps = [
        WorkflowStep.of("first", "mail"),
        WorkflowStep.of("second", "mail", after=("first", TaskRef("other", "x"))),
        WorkflowStep.of("last", "mail", after=("second",), when="failed"),
    ]
    asyncio.run(_store(store, steps))


async def _store(store: Shared, steps: list[WorkflowStep], name: str = "w") -> None:
    await Queue(store).workflows.put(steps, id=name)


def test_show_and_cancel(cli: Cli, store: Shared) -> None:
    """U15: a workflow is shown with its steps, what they wait for and why, and cancelled."""
    _put(store)
    assert cli("workflow", "show", "w").out.split() == ["id", "w", "state", "stored"]
    asyncio.run(Expander(store).drain())
    shown = cli("workflow", "show", "w").out
    rows = [line.split()[0] for line in shown.splitlines() if " mail " in line]
    assert rows == ["first", "second", "last"]
    assert "first, other/x" in shown
    assert "(failed)" in shown
    made = cli("workflow", "show", "w", "--json").json
    assert [step["status"]["state"] for step in made["steps"]] == [
        "waiting",
        "cancelled",
        "waiting",
    ]
    assert "--yes" in cli("workflow", "cancel", "w").err
    assert cli("workflow", "cancel", "w", "--yes", "--json").json == {"cancelled": True}
    asyncio.run(Expander(store).drain())
    assert "the workflow has ended" in cli("workflow", "cancel", "w", "--yes").out
    assert "a workflow that does not exist" in cli("workflow", "show", "never").err


def test_list(cli: Cli, store: Shared) -> None:
    """U15, U18: workflows are listed by pages, newest first, after those whose steps are not all published."""
    assert "No workflows" in cli("workflow", "list").out
    for name in ("first", "second"):
        asyncio.run(_store(store, [WorkflowStep.of("a", "mail", "x" * 200_000)], name))
        asyncio.run(Expander(store).drain())
    asyncio.run(_store(store, [WorkflowStep.of("a", "mail")], "stored"))
    assert cli("workflow", "cancel", "second", "--yes").code == 0
    asyncio.run(Expander(store).drain())
    asyncio.run(_store(store, [WorkflowStep.of("a", "mail")], "later"))
    listed = cli("workflow", "list")
    rows = [line.split()[:4] for line in listed.out.splitlines() if line.strip()][2:]
    assert [row[0] for row in rows] == ["later", "stored", "second", "first"]
    assert [row[-1] for row in rows[:1]] == ["stored"]
    assert rows[2] == ["second", "1", "0", "ended"]
    assert rows[3] == ["first", "1", "0", "running"]
    names, words = [], ["workflow", "list", "--limit", "1"]
    while True:
        page = cli(*words, "--json").json
        names += [each["id"] for each in page["workflows"]]
        if "next" not in page:
            break
        words = ["workflow", "list", "--limit", "1", "--after", page["next"]]
    assert names == ["later", "stored", "second", "first"]
    assert f"--after {cli('workflow', 'list', '--limit', '2', '--json').json['next']}" in (
        cli("workflow", "list", "--limit", "2").err
    )
    assert "after: got" in cli("workflow", "list", "--after", "9.x").err

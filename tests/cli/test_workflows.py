"""``taskqueue workflow``: show and cancel, on a shared store."""

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


async def _store(store: Shared, steps: list[WorkflowStep]) -> None:
    await Queue(store).workflows.put(steps, id="w")


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

"""The page about finding tasks: its commands run in this order and print what the page shows."""

from __future__ import annotations

import asyncio
import re
import shlex
from pathlib import Path

import pytest

from taskqueue_cli import main
from taskqueue_core.tasks import Task
from tests.cli.shared import Shared, renew
from tests.docs.programs import blocks

PAGE = (Path(__file__).parents[2] / "docs" / "finding.md").read_text()


async def _publish(store: Shared, *numbers: int) -> None:
    for number in numbers:
        user, tenant = ("user:42", "acme") if number % 2 else ("user:7", "globex")
        user = "user:42" if number in (1, 4) else user
        await store.publisher.publish(
            Task(key="mail", id=f"order-{number}", tags=(user,), tenant=tenant)
        )


async def _finish(store: Shared) -> None:
    async with store.subscribe(["mail"], "worker-1") as subscription:
        for delivery in (await subscription.receive(3, 5)).deliveries:
            await subscription.ack(delivery)


def test_its_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """U18: tasks are listed by state, tag, worker and time; each command prints what the page shows."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    monkeypatch.setenv("TASKQUEUE_BACKEND", "tests.cli.shared")
    store = renew()
    asyncio.run(_publish(store, 1, 2, 3))
    shown = [
        (command, expected)
        for block in blocks(PAGE, "console")
        for command, expected in re.findall(
            r"^\$ taskqueue (.+)\n((?:(?!\$ ).*\n?)*)", block, re.MULTILINE
        )
    ]
    assert len(shown) == 10
    for number, (command, expected) in enumerate(shown):
        if number == 2:  # the setting applies to tasks that are published from then on
            asyncio.run(_publish(store, 4))
        if number == 3:
            asyncio.run(_finish(store))
        capsys.readouterr()
        assert main(shlex.split(command)) == 0
        printed = capsys.readouterr()
        text = " ".join((printed.out + printed.err).split())
        pattern = ".*".join(re.escape(" ".join(part.split())) for part in expected.split("..."))
        assert re.search(pattern, text), (command, text)

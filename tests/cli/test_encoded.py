"""The commands show what a codec has encoded as such, and decode a result for a reader that has the codec."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from taskqueue_core import Cron, Queue, Schedule
from tests.cli.conftest import Cli
from tests.cli.shared import Shared

KEY = "cw_0x689RpI-jtRR7oE8h_eQsKImvJapLeSbXpwF4e4="
MODULE = f"""
from taskqueue_core import CodecChain, Fernet, Tasks, Zlib

def registry(key):
    tasks = Tasks(codec=CodecChain(Zlib(), Fernet(keys={{"2026-11": key}})))

    @tasks.task
    async def charge(card: str) -> str:
        return card

    return tasks

tasks = registry("{KEY}")
other = registry("{KEY[::-1][1:]}=")
plain = Tasks()

@plain.task("charge")
async def plain_charge(card: str) -> str:
    return card
"""
SHOWN = "encoded (zlib, fernet, key 2026-11)"


@pytest.fixture
def encoded(store: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue with an encoded result, an encoded dead letter and a schedule; the module ``vault`` of the tasks."""
    (tmp_path / "vault.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "vault", raising=False)
    from vault import tasks  # type: ignore[import-not-found] # noqa: PLC0415 - written above

    charge = tasks.functions["charge"]

    async def work() -> None:
        queue = Queue(store)
        async with tasks.connect(queue):
            calls = (charge.using(id=name).call("card-4711") for name in ("done", "dead"))
            await tasks.publish_many(calls)
        await queue.schedules.put(Schedule("daily", Cron("@daily"), charge.call("card-4711")))
        async with store.subscribe(["charge"], "c") as subscription:
            done, dead = (await subscription.receive(2, 0)).deliveries
            result = charge.encoding.result(b'"card-4711"')
            await subscription.ack(done, results=(result,))
            error = charge.encoding.error_of("LookupError", "card-4711 is unknown")
            await subscription.dead_letter(dead, "no", error)

    asyncio.run(work())


@pytest.mark.usefixtures("encoded")
def test_result(cli: Cli) -> None:
    """U17: ``result --codec`` decodes; without it, the stored text is printed, and a note says what to do."""
    decoded = cli("result", "charge", "done", "--codec", "vault:tasks")
    assert (decoded.code, decoded.json) == (0, "card-4711")
    raw = cli("result", "charge", "done")
    assert raw.json.startswith("taskqueue-codec zlib+fernet:2026-11 ")
    assert f"the result is {SHOWN}: decode it with --codec MODULE:ATTR" in raw.err
    for target, code, why in (
        ("vault:other", 1, "the data is damaged, or encrypted with another key"),
        ("vault:plain", 1, "the registry has no codec"),
        ("vault", 2, "has 3 registries of tasks"),
        ("vault:nothing", 2, "has no 'nothing'"),
    ):
        wrong = cli("result", "charge", "done", "--codec", target)
        assert why in wrong.err, wrong.err
        assert (wrong.code, wrong.out) == (code, "")
    unknown = cli("result", "typo", "done", "--codec", "vault:tasks")
    assert "has no task of the queue 'typo'" in unknown.err


@pytest.mark.usefixtures("encoded")
def test_other_commands(cli: Cli) -> None:
    """U17: the texts of errors, payloads and schedules are shown as encoded."""
    for command in (
        ("status", "charge", "dead"),
        ("dlq", "list", "charge"),
        ("dlq", "show", "charge", "dead"),
        ("schedule", "show", "daily"),
    ):
        shown = cli(*command)
        assert shown.code == 0, shown.err
        assert SHOWN in shown.out, (command, shown.out)
        assert "taskqueue-codec " not in shown.out


@pytest.mark.usefixtures("encoded")
def test_tasks(cli: Cli) -> None:
    """U17: the codec is printed apart from the headers, because a plain task must not have its header."""
    (shown,) = cli("tasks", "declared", "vault:tasks", "--json").json
    assert shown["codec"] == "zlib+fernet:2026-11"
    assert list(shown["headers"]) == ["taskqueue-schema"]
    (plain,) = cli("tasks", "declared", "vault:plain", "--json").json
    assert "codec" not in plain

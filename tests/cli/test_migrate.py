"""The command ``taskqueue migrate``, and the configuration of two backends."""

import asyncio
from typing import Any

import pytest

from taskqueue_core.assembly import open_backend
from taskqueue_core.migration import MigratingBackend
from taskqueue_core.tasks import Task
from tests.cli.conftest import Cli
from tests.cli.shared import Shared, renew

KEY = "resize"


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> Shared:
    """The empty store from which the migration moves tasks to the shared store."""
    monkeypatch.setenv("TASKQUEUE_MIGRATE_FROM", "tests.cli.shared:create_old")
    return renew("old")


def ledgers(*stores: Shared) -> list[Any]:
    """Return the ledger of the queue in each store."""

    async def read() -> list[Any]:
        return [await store.control.ledger(KEY) for store in stores]

    return asyncio.run(read())


def settle(store: Shared) -> None:
    """Execute all waiting tasks of a store."""

    async def work() -> None:
        async with store.subscribe([KEY], "worker") as subscription:
            await subscription.ack(*(await subscription.receive(100, 0)).deliveries)

    asyncio.run(work())


def test_from_start_to_finish(cli: Cli, store: Shared, old: Shared) -> None:
    """A20: in each phase of a migration, new tasks go to the right store.

    Each command shows the phase and the unfinished queues.
    """
    assert "not started" in cli("migrate", "status").out
    assert cli("publish", KEY, "--id", "a").code == 0
    started = cli("migrate", "start", "--json").json
    (queue,) = started["queues"]
    assert (started["phase"], started["leaves"]) == ("started", "old")
    assert (queue["key"], queue["takes_in"], queue["waiting"]) == (KEY, "new", 1)
    assert cli("publish", KEY, "--id", "b").code == 0
    assert "duplicate" in cli("publish", KEY, "--id", "a").out
    assert [one.published for one in ledgers(old, store)] == [1, 1]
    assert cli("stats", KEY, "--json").code == 0
    refused = cli("migrate", "finish", "--json")
    assert (refused.code, refused.json["error"]["code"]) == (1, "migration_unfinished")
    assert KEY in refused.json["error"]["detail"]
    shown = cli("migrate", "status").out
    assert KEY in shown
    assert "started" in shown
    settle(old)
    done = cli("migrate", "finish")
    assert done.code == 0
    assert "finished" in done.out
    assert "300 s" in done.out
    assert cli("migrate", "finish").code == 0


def test_and_back(cli: Cli, store: Shared, old: Shared) -> None:
    """Fault J2: after a rollback, new tasks go to the old store again; repeating a command is harmless."""
    for _ in range(2):
        assert cli("migrate", "start", "--json").json["phase"] == "started"
    cli("publish", KEY, "--id", "a")
    for _ in range(2):
        assert cli("migrate", "rollback", "--json").json["leaves"] == "new"
    cli("publish", KEY, "--id", "b")
    assert [one.published for one in ledgers(old, store)] == [1, 1]
    forced = cli("migrate", "finish", "--force", "--json").json
    assert forced["phase"] == "rolled_back"
    assert cli("migrate", "rollback", "--force").code == 0


def test_without_an_old_side(cli: Cli) -> None:
    """Without a backend to migrate from, the error names the variable to set."""
    done = cli("migrate", "status")
    assert done.code == 2
    assert "TASKQUEUE_MIGRATE_FROM" in done.err


@pytest.mark.parametrize(
    ("variable", "word", "said"),
    [
        ("MIGRATE_FROM", "server", "TASKQUEUE_MIGRATE_FROM"),
        ("BACKEND", "server", "TASKQUEUE_BACKEND"),
        ("MIGRATE_FROM", "no.such", "the backend to migrate from: no backend 'no.such'"),
        ("MIGRATE_FROM", "memory", "exists in one process only"),
        ("MIGRATE_MODE", "hasty", "TASKQUEUE_MIGRATE_MODE"),
    ],
)
def test_what_cannot_be_migrated(
    variable: str, word: str, said: str, cli: Cli, old: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A20: a mistake in the configuration of a migration is reported before anything changes."""
    monkeypatch.setenv(f"TASKQUEUE_{variable}", word)
    done = cli("migrate", "start")
    assert done.code == 2
    assert said in done.err
    assert ledgers(old)[0].published == 0


def test_two_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A20: if both backends are Redis, each has its own settings; those of the old one have the prefix ``OLD_``."""
    monkeypatch.setenv("TASKQUEUE_BACKEND", "redis")
    monkeypatch.setenv("TASKQUEUE_MIGRATE_FROM", "redis")
    monkeypatch.setenv("TASKQUEUE_MIGRATE_MODE", "strict")
    monkeypatch.setenv("TASKQUEUE_REDIS_URL", "redis://:secret@127.0.0.1:2")
    monkeypatch.setenv("TASKQUEUE_OLD_REDIS_URL", "redis://127.0.0.1:1")
    opened = open_backend()
    inner = opened.inner
    assert isinstance(inner, MigratingBackend)
    urls = [side.backend._context.settings.url.get_secret_value() for side in inner.members]  # type: ignore[attr-defined]
    assert urls == ["redis://127.0.0.1:1", "redis://:secret@127.0.0.1:2"]
    assert inner.mode == "strict"
    monkeypatch.setenv("TASKQUEUE_OLD_REDIS_LEASE", "hunter2")
    with pytest.raises(Exception, match="TASKQUEUE_OLD_REDIS_LEASE") as error:
        open_backend()
    assert "hunter2" not in str(error.value)


def test_a_queue_through_the_front_door(old: Shared, store: Shared) -> None:
    """A20: an application that opens the configured backend uses both stores of the migration."""

    async def use() -> None:
        backend = open_backend()
        await backend.publisher.publish(Task(key=KEY))
        await backend.aclose()

    asyncio.run(use())
    assert [one.published for one in ledgers(old, store)] == [1, 0]

"""``taskqueue apply`` and ``taskqueue tasks declared``."""

from __future__ import annotations

import pytest

from taskqueue_core.capabilities import Owner
from tests.cli.conftest import Cli
from tests.cli.shared import Shared

SHOP = "tests.cli.work:shop"


def test_declarations_are_written(cli: Cli, store: Shared) -> None:
    """U3: ``apply`` writes declared policies and prints what has changed; with ``--dry-run``, it only prints."""
    planned = cli("apply", SHOP, "--dry-run")
    assert (planned.code, planned.err) == (0, "")
    assert "shop.resize: timeout none → 30" in planned.out
    assert "shop.resize: rate_limit none → 100/1m" in planned.out
    assert "max_attempts 50 → 10, delays none → 5 60" in " ".join(planned.out.split())
    assert "queues: 2, settings to change: 4" in planned.out
    assert store.control._store.queues == {}
    done = cli("apply", SHOP, "--json").json
    assert [(each["key"], each["field"]) for each in done["changed"]] == [
        ("shop.resize", "retry"), ("shop.resize", "timeout"), ("shop.resize", "rate_limit"), ("images", "retry"),
    ]  # fmt: skip
    assert done["changed"][2]["declared"] == {
        "max_tokens": 100, "interval": 1, "interval_unit": "MINUTES"
    }  # fmt: skip
    assert "queues: 2, settings changed: 0" in cli("apply", SHOP).out


def test_registries_that_contradict_each_other(cli: Cli, store: Shared) -> None:
    """U3: ``apply`` and ``worker`` refuse different values for a shared queue alike, before they ask the store."""
    for command in ("apply", "worker"):
        refused = cli(command, "tests.cli.work:contradicting")
        assert refused.code == 2
        assert " ".join(refused.err.split()) == (
            "error: the tasks 'shop.resize' and 'other.enlarge' share the queue 'shop.resize', but declare different "
            "values of timeout: declare it at one of them, or the same value at both"
        )
    assert store.control._store.queues == {}


def test_an_operator_keeps_and_gives_back(cli: Cli, store: Shared) -> None:
    """U4: what ``queue set`` has changed survives an apply, until it is given back; ``--prune`` resets the rest."""
    cli("apply", SHOP)
    cli("queue", "set", "shop.resize", "--rate", "5/1m")
    said = " ".join(cli("apply", SHOP).out.split())
    assert "kept rate_limit, set by an operator (rate_limit 5/1m → 100/1m is declared)" in said
    cli("queue", "set", "shop.resize", "--give-back", "rate-limit")
    assert "rate_limit 5/1m → 100/1m" in cli("apply", SHOP).out
    settings = store._store.known("images").settings.model_copy(
        update={"capacity": 3, "owners": {"retry": Owner.DECLARED, "capacity": Owner.DECLARED}}
    )
    store._store.configure("images", settings)
    assert "capacity is declared no more (capacity 3 → none)" in " ".join(
        cli("apply", SHOP).out.split()
    )
    assert cli("apply", SHOP, "--prune", "--json").json["changed"][0]["field"] == "capacity"


def test_tasks_are_shown_with_their_schema(cli: Cli) -> None:
    """U2: ``tasks declared`` lists names, queues and arguments; ``--schema`` has what other languages need."""
    shown = " ".join(cli("tasks", "declared", SHOP).out.split())
    assert "shop.resize shop.resize image, width?" in shown
    assert "shop.crop images image" in shown
    resize, crop = cli("tasks", "declared", SHOP, "--schema").json
    assert (resize["name"], resize["queue"], resize["payload"]["required"]) == (
        "shop.resize", "shop.resize", ["image"]
    )  # fmt: skip
    assert resize["payload"]["properties"]["width"] == {"title": "Width", "type": "integer"}
    assert crop["headers"]["taskqueue-task"] == "shop.crop"
    assert cli("tasks", "declared", "tests.cli.work:worker", "--json").json[0]["name"] == "double"


@pytest.mark.parametrize("command", ["apply", "tasks declared"])
def test_a_wrong_target_is_explained(cli: Cli, command: str) -> None:
    """U2, U3: without a target, or with a wrong one, the error says that a registry or a worker is expected."""
    words = command.split()
    missing, wrong = cli(*words), cli(*words, "tests.cli.work:WORKER_ID")
    assert missing.code == 2
    assert "name the registry of tasks, or the worker, for example shop.tasks:tasks" in missing.err
    assert "registry of tasks" in wrong.err + cli(*words, "no target").err


def test_through_a_server(cli: Cli, server: str) -> None:
    """U3, U4: through a server, an apply writes the declared owners, and an operator's change is kept."""
    at = ["--server", server]
    assert len(cli("apply", SHOP, "--json", *at).json["changed"]) == 4
    shown = cli("queue", "show", "shop.resize", "--json", *at).json
    assert (shown["timeout"], shown["owners"]["timeout"]) == (30, "declared")
    cli("queue", "set", "shop.resize", "--timeout", "60", *at)
    kept = cli("apply", SHOP, "--json", *at).json["kept"]
    assert [(each["field"], each["stored"]) for each in kept] == [("timeout", 60)]

"""``taskqueue tenant``."""

from __future__ import annotations

from tests.cli.conftest import Cli
from tests.cli.shared import Shared
from tests.cli.test_queues import KEY, in_force, publish


def test_tenants_are_paused(cli: Cli, store: Shared) -> None:
    """U21: one tenant of a queue is paused and resumed; the queue must have fair order."""
    publish(store, "a")
    wrong = cli("tenant", "pause", KEY, "acme", "--json")
    assert (wrong.code, wrong.json["error"]["field"]) == (2, "tenant")
    cli("queue", "set", KEY, "--order", "fair")
    assert "fair, paused tenants acme version 2" in " ".join(
        cli("tenant", "pause", KEY, "acme").out.split()
    )
    told = cli("tenant", "pause", KEY, "beta", "--json").json
    assert told["paused_tenants"] == ["acme", "beta"]
    assert cli("tenant", "resume", KEY, "acme", "--json").json["paused_tenants"] == ["beta"]
    assert in_force(store).paused_tenants == ("beta",)
    assert cli("tenant", "resume", KEY, "nobody").code == 0
    assert in_force(store).version == 4
    shown = [
        (entry["action"], entry["key"], entry["details"]) for entry in cli("audit", "--json").json
    ]
    assert shown == [
        ("resume tenant", KEY, "tenant=acme"),
        ("pause tenant", KEY, "tenant=beta"),
        ("pause tenant", KEY, "tenant=acme"),
        ("change settings", KEY, 'order="fair"'),
    ]

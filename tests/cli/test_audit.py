"""``taskqueue audit``, and the entries of commands that use a store directly."""

from __future__ import annotations

import json

from tests.cli.conftest import Cli


def test_commands_are_recorded(cli: Cli) -> None:
    """U21: a command that changes something leaves an entry with the user, as the server does with the token."""
    cli("publish", "mail", "1")
    cli("queue", "pause", "mail")
    cli("purge", "mail", "--confirm", "mail")
    shown = json.loads(cli("audit", "--json").out)
    assert [(e["action"], e["key"], e["tasks"]) for e in shown] == [
        ("purge", "mail", 1),
        ("pause", "mail", None),
    ]
    assert "purge" in cli("audit", "--limit", "1").out
    assert "paused" not in cli("audit", "--limit", "1").out

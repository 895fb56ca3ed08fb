"""The commands, the example and the numbers in docs/security.md agree with the code."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from taskqueue_cli import main
from taskqueue_core.config import Settings
from taskqueue_dispatch.config import DispatchSettings
from taskqueue_server.auth import quotas
from taskqueue_server.auth.access import CHECK_SECONDS, RELOAD_SECONDS
from taskqueue_server.auth.tokens import VERBS, Tokens, read_entries
from taskqueue_server.context import connections
from taskqueue_server.context.unauthenticated import (
    BODY_BYTES,
    INPUT_BYTES,
    RECEIVE_BYTES,
    SECONDS,
    TURN_BYTES,
)
from taskqueue_server.logs import LINES
from taskqueue_server.worker_socket.admission import HELLO_SECONDS

PAGE = (Path(__file__).parents[2] / "docs/security.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ taskqueue (token .+)$", PAGE, re.MULTILINE)


def test_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Security 6: the commands of the page, run in order, create the tokens and replace one of them."""
    path = tmp_path / "tokens.toml"
    monkeypatch.setenv("TASKQUEUE_TOKENS_FILE", str(path))
    made: list[str] = []
    for command in COMMANDS:
        capsys.readouterr()
        assert main(shlex.split(command)) == 0, command
        if command.startswith("token new"):
            made += capsys.readouterr().out.split()
    ops, screen, web, old, bulk, new = made
    tokens = Tokens.load(path)
    may = {
        token: {verb for verb in VERBS if who.is_allowed(verb, "mail-1")}
        for token in (ops, screen, web, new)
        if (who := tokens.identify(token, 0))
    }
    assert may == {ops: {"admin"}, screen: {"observe"}, web: {"publish"}, new: {"consume"}}
    assert tokens.identify(old, 0) is None
    limited = tokens.identify(bulk, 0)
    assert limited is not None
    assert (limited.rate, limited.burst, limited.connections) == (50, 200, 20)


def test_the_example_and_the_tables() -> None:
    """The example token file is valid, and the tables name all verbs and existing settings."""
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (entry,) = read_entries(text.encode(), Path("tokens.toml"))
    assert entry.expires_at == 1801396800
    assert re.findall(r"^\| `(\w+)` \| to |^\| `(\w+)` \| queues", PAGE, re.MULTILINE)
    assert all(f"| `{verb}` |" in PAGE for verb in VERBS)
    named = set(re.findall(r"TASKQUEUE_([A-Z_]+)", PAGE))
    known = {
        *Settings.model_fields,
        *(f"dispatch_{name}" for name in DispatchSettings.model_fields),
    }
    assert {name.lower() for name in named} <= known
    for name in ("tokens_file", "tls_certificate", "tls_key", "tls_ca", "allowed_hosts", "origins"):
        assert f"TASKQUEUE_{name.upper()}" in PAGE


def test_the_numbers() -> None:
    """The times and limits on the page are those of the code."""
    assert (RELOAD_SECONDS, CHECK_SECONDS, HELLO_SECONDS) == (2.0, 3.0, 5.0)
    assert f"{connections.MAX_STRANGERS} sockets may be in that state" in PAGE
    assert f"default: {quotas.DEFAULT_SOCKETS}" in PAGE
    for name in ("unauthenticated_connections", "unauthenticated_per_address"):
        default = Settings.model_fields[name].default
        assert f"| `TASKQUEUE_{name.upper()}` | {default}: " in PAGE
    limits = (INPUT_BYTES, BODY_BYTES, TURN_BYTES, RECEIVE_BYTES, SECONDS, LINES)
    assert limits == (65536, 32768, 16384, 2048, 10.0, 50)

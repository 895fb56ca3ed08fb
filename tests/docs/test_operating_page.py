"""The page for operators: its commands work as shown, and its table of reloadable settings agrees with the code."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import httpx2
import pytest

from taskqueue_cli import main
from taskqueue_server.process.reload import LIVE
from tests.redis.serving import serving

PAGE = (Path(__file__).parents[2] / "docs/operating.md").read_text("utf-8")
*TOKENS, SERVE = re.findall(r"^\$ (.+)$", PAGE, re.MULTILINE)


async def test_in_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first block creates tokens and starts several server processes on one Redis store.

    The server requires the tokens.
    """
    monkeypatch.chdir(tmp_path)
    shown = []
    for command in TOKENS:
        program, *words = shlex.split(command)
        assert program == "taskqueue"
        assert main([*words, "--json"]) == 0
        shown.append(re.findall(r'"token":"([^"]+)"', capsys.readouterr().out)[0])
    variables, words = shlex.split(SERVE.partition(" taskqueue ")[0]), shlex.split(SERVE)[-2:]
    told: dict[str, Any] = dict(
        one.removeprefix("TASKQUEUE_").lower().split("=") for one in variables
    )
    assert told.pop("backend") == "redis"
    # The test uses an embedded Redis instead of an existing one.
    store = f"--embedded-redis={tmp_path / 'store'}"
    async with serving(tmp_path, *words, store, **told) as it:
        assert len(it.pids()) == 2
        async with httpx2.AsyncClient(base_url=it.url, trust_env=False) as client:
            body = {"key": "mail-news", "id": "1"}
            publisher, worker = ({"authorization": f"Bearer {token}"} for token in shown)
            for headers, status in (({}, 401), (worker, 403), (publisher, 201)):
                answer = await client.post("/v1/tasks", json=body, headers=headers)
                assert answer.status_code == status
            for path in ("/alive", "/ready", "/health"):
                assert (await client.get(path)).status_code == 200


def test_what_a_reload_changes() -> None:
    """The table names exactly the settings that a reload changes."""
    row = next(line for line in PAGE.splitlines() if line.startswith("| `drain`"))
    assert set(re.findall(r"`([a-z_]+)`", row.split("|")[1])) == LIVE

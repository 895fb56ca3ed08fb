"""The page about streaming: its programs and commands print what it shows, and its lists agree with the code (U19)."""

from __future__ import annotations

import asyncio
import importlib
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from taskqueue_core.capabilities import EventKind, QueueSettings
from taskqueue_memory import MemoryBackend
from taskqueue_worker import Worker
from tests.application.running import working
from tests.application.test_page import FASTAPI
from tests.binaries import curl, node
from tests.docs.programs import blocks, run
from tests.modules import own_package
from tests.remote.test_real_server import serving

PAGE = (Path(__file__).parents[2] / "docs" / "streaming.md").read_text()
SESSION, *SHOWN = blocks(PAGE, "console")
(BROWSER,) = blocks(PAGE, "javascript")
RESPONSES = "from starlette.responses import StreamingResponse\n"
USE_WEB = """
from starlette.testclient import TestClient
from web import app

with TestClient(app) as client:
    asked = client.post("/ask/what").json()
    print(client.get(f"/answers/{asked['id']}").text.split(), len(asked["ticket"]))
"""
USE_BROWSER = """
let text = "";
const done = (...found) => console.log(...found);
const [id, ticket] = process.argv.slice(1);
"""


async def test_its_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """U19: the programs and the commands of the page run as written, in a browser's script too."""
    curl()
    monkeypatch.delenv("http_proxy", raising=False)
    for text in blocks(PAGE, "python"):
        (tmp_path / text.partition("\n")[0].removeprefix("# ")).write_text(text)
    (tmp_path / "fastapi").mkdir()
    (tmp_path / "fastapi" / "__init__.py").write_text(FASTAPI)
    (tmp_path / "fastapi" / "responses.py").write_text(RESPONSES)
    monkeypatch.syspath_prepend(str(tmp_path))
    async with serving(MemoryBackend()) as remote:
        url = remote._client.address.shown
        monkeypatch.setenv("TASKQUEUE_SERVER_URL", url)
        with own_package("answers"):
            tasks = importlib.import_module("answers").tasks
            async with working(Worker(tasks, url=url)):
                program = (tmp_path / "ask.py").read_text().replace("asyncio.run(main())", "")
                names: dict[str, Any] = {}
                exec(compile(program, "page", "exec"), names)  # noqa: S102 - an example of this project
                await names["main"]()
                printed = SESSION.partition("$ python ask.py\n")[2]
                assert capsys.readouterr().out == printed
                for shown in SHOWN:
                    for command, expected in _commands(shown):
                        assert _fits(expected, await _run(*shlex.split(_here(command, url))))
                web = await _run(sys.executable, "-c", USE_WEB, cwd=tmp_path)
                assert web == "['as', 'you', 'like', 'it'] 54\n"
        ticket = await remote.streams.ticket("answer", "a1", 60)
        script = USE_BROWSER + _here(BROWSER, url)
        words = (str(node().path), "--experimental-eventsource", "-e", script, "a1", ticket)
        assert await _run(*words) == "as you like it  done\n"


def _commands(shown: str) -> list[tuple[str, str]]:
    """Return the commands of a block, each with what it prints."""
    return re.findall(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", shown, re.MULTILINE)


def _here(text: str, url: str) -> str:
    return text.replace("http://localhost:8420", url).replace("localhost:8420", url)


def _fits(expected: str, printed: str) -> bool:
    pattern = ".*".join(re.escape(part) for part in expected.strip().split("..."))
    return re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None


async def _run(*words: str, cwd: Path | None = None) -> str:
    return await asyncio.to_thread(run, *words, cwd=cwd)


def test_its_lists() -> None:
    """U19: the page has each kind of event, and each setting with its default."""
    for kind in EventKind:
        assert f"| `{kind}` |" in PAGE
    defaults = {"stream_events": "1,000", "stream_bytes": "1 MiB", "stream_ttl": "3,600"}
    for name, default in defaults.items():
        assert f"| `{name}` | `{name.removeprefix('stream_')}` | {default} |" in PAGE
    settings = QueueSettings()
    assert (settings.stream_events, settings.stream_bytes, settings.stream_ttl) == (
        1000,
        1024 * 1024,
        3600,
    )

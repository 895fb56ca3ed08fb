"""The page about codecs: its programs and its command run as shown."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from cryptography.fernet import Fernet as Cipher

from taskqueue_core.config import Settings
from taskqueue_memory import MemoryBackend
from taskqueue_server import ServerProcess
from tests.docs.programs import background, blocks, python
from tests.docs.test_flow_page import commands, follow
from tests.modules import own_package
from tests.server.in_thread import in_thread

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "codecs.md").read_text()
MODULE, PUBLISH, OWN = blocks(PAGE, "python")
SETUP, RESULT = blocks(PAGE, "console")


def test_programs_and_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """U17: the page's module, program and command print what it says."""
    key_command, worker_command = (command for command, _ in commands(SETUP))
    assert "Fernet.generate_key()" in key_command
    assert worker_command == "taskqueue worker shop.tasks:tasks"
    monkeypatch.setenv("SHOP_KEY", Cipher.generate_key().decode())
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "tasks.py").write_text(MODULE)
    served = in_thread(ServerProcess(MemoryBackend(), Settings(port=0)))
    with own_package("shop"), served as server:
        monkeypatch.setenv("TASKQUEUE_SERVER_URL", server.url)
        with background([sys.executable, "-m", "taskqueue_cli", *worker_command.split()[1:]]):
            printed = python(PUBLISH).splitlines()
        prose = " ".join(PAGE.split())
        expected = re.findall(r"It prints `(.*?)`, then `(.*?)`, and `(.*?)`", prose)
        assert printed == [*expected[0]]
        follow(commands(RESULT), capsys)


def test_own_codec(tmp_path: Path) -> None:
    """U17: the page's own codec works, and refuses what is damaged or too large."""
    program = f"""{OWN}
import json

codec, answers = Bzip2(), []
for data in (codec.encode(b"x" * 10_000_000), codec.encode(b"x")[:-1], b"damaged"):
    try:
        answers.append(codec.decode(data, None).decode())
    except Undecodable as error:
        answers.append(str(error))
print(json.dumps([codec.decode(codec.encode(b"plain"), None).decode(), *answers]))
"""
    incomplete = "the data is incomplete or too large (bzip2)"
    assert json.loads(python(program, tmp_path)) == [
        "plain",
        incomplete,
        incomplete,
        "the data is damaged (bzip2)",
    ]

"""The page about the dispatcher: its commands and code run as shown, and its tables agree with the code."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest

from taskqueue_dispatch.config import DispatchSettings
from taskqueue_dispatch.models import ModelConfig
from tests.binaries import curl
from tests.docs.programs import background, blocks, run
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "dispatcher.md").read_text()
FILES = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
(DOTENV,) = blocks(PAGE, "ini")
COMMANDS = re.findall(r"^\$ (.+)\n((?:(?!\$ |```).+\n)*)", PAGE, re.MULTILINE)


class Place:
    """A folder with the files of the page, and free ports in place of those on the page."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {shown: str(free_port()) for shown in ("8420", "9000", "9001")}
        for name, text in FILES.items():
            (folder / name).write_text(text)
        (folder / ".env").write_text(self.here(DOTENV))
        kept = {n: text for n, text in os.environ.items() if not n.startswith("TASKQUEUE_")}
        self.env = kept | {
            "TASKQUEUE_PORT": self.ports["8420"],
            "TASKQUEUE_SERVER_URL": f"http://127.0.0.1:{self.ports['8420']}",
            "PYTHONUNBUFFERED": "1",
        }

    def here(self, text: str) -> str:
        """Replace the ports of a text from the page by the ports of this test."""
        for shown, port in self.ports.items():
            text = text.replace(shown, port)
        return text

    def words(self, command: str) -> list[str]:
        """Return the words of a command from the page, with the Python of this environment."""
        first, *rest = shlex.split(self.here(command))
        if first == "taskqueue":
            return [sys.executable, "-m", "taskqueue_cli", *rest]
        return [sys.executable if first == "python" else first, *rest]

    def start(self, words: list[str], **more: Any) -> AbstractContextManager[subprocess.Popen[str]]:
        """Run a program in the folder until the end of the block."""
        return background(words, cwd=self.folder, env=self.env, **more)

    def run(self, *words: str) -> str:
        """Run a program in the folder; return what it prints."""
        return run(*words, cwd=self.folder, env=self.env)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The folder that all tests of the page share."""
    return Place(tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def running(place: Place) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """The processes that the page starts in the background, by the second word of their command."""
    programs = {}
    with ExitStack() as stack:
        for command, _ in COMMANDS:
            if command.endswith("&"):
                words = place.words(command.removesuffix("&"))
                program = stack.enter_context(place.start(words, stderr=subprocess.DEVNULL))
                programs[shlex.split(command)[1]] = program
        for name in ("dispatch", "-m"):
            out = programs[name].stdout
            assert out is not None
            assert out.readline()
        yield programs


def test_the_five_commands(place: Place, running: dict[str, subprocess.Popen[str]]) -> None:
    """C6, C7: the commands of the page lead to a finished job.

    Its receiver gets a notification with a valid signature.
    """
    shown = [
        (command, told)
        for command, told in COMMANDS
        if re.match(r"taskqueue dispatch (register|submit)", command)
    ]
    assert len(shown) == 2
    printed = ""
    for command, told in shown:
        printed = place.run(*place.words(command))
        assert not told or printed.split() == told.split()
    result = json.loads(printed)
    assert result["server"] == "gpu"
    receiver = running["receiver.py"].stdout
    assert receiver is not None
    assert receiver.readline().startswith(f"{result['job_id']} done ")


@pytest.mark.usefixtures("running")
def test_the_other_ways_to_submit(place: Place) -> None:
    """C6, OPEN-C1: a job can also be submitted with curl and with the client function, and is confirmed."""
    url = place.env["TASKQUEUE_SERVER_URL"]
    outcome, _ = place.run(sys.executable, "client.py", url).split()
    assert outcome in {"leased", "queued"}
    (command,) = [command for command, _ in COMMANDS if command.startswith("curl ")]
    curl()
    told = [json.loads(place.run(*place.words(command))) for _ in range(2)]
    assert told[0]["job_id"] == told[1]["job_id"]


def test_a_server_of_a_model(place: Place) -> None:
    """B9, C2: the component on the page serves a model, and a program finds a slot of it without a server."""
    port = str(free_port())
    with place.start([sys.executable, "gpu.py", port]):
        endpoint = f"http://127.0.0.1:{port}/generate"
        assert place.run(sys.executable, "inside.py", endpoint) == "success\n"


def table(first: str) -> dict[str, str]:
    """Return the first two columns of the table with this first heading."""
    rest = PAGE[PAGE.index(f"| {first} |") :].splitlines()[2:]
    rows: dict[str, str] = {}
    for line in rest:
        if not line.startswith("| "):
            return rows
        name, default, _ = (cell.strip(" `") for cell in line.strip("| ").split(" | ", 2))
        rows[name] = default
    raise AssertionError(first)


def test_every_field_of_a_model() -> None:
    """C5: the table contains all fields of a model's configuration with their defaults."""
    told = table("field")
    defaults = ModelConfig().model_dump(mode="json")
    assert list(told) == list(defaults)
    for name, shown in told.items():
        expected = "none" if defaults[name] in (None, {}) else str(defaults[name])
        assert shown == expected, name


def test_every_setting() -> None:
    """The table contains all dispatcher settings with their defaults."""
    told = table("`TASKQUEUE_DISPATCH_…`")
    defaults = DispatchSettings.model_construct().model_dump(mode="json")
    assert [name.lower() for name in told] == list(defaults)
    for name, shown in told.items():
        value = defaults[name.lower()]
        if name == "ENDPOINTS_ALLOWED":
            continue
        expected = "none" if value in (None, []) else json.dumps(value).replace(" ", "")
        assert shown == expected, name

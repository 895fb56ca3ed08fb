"""The embedded store: a Redis or Valkey server that the product starts itself."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

from taskqueue_core.errors import ConfigurationError
from taskqueue_redis.embedded import server
from taskqueue_redis.embedded.binaries import Binary, find_binary
from taskqueue_redis.embedded.server import EmbeddedRedis
from tests.redis.embedded import alive, ask, binary_of, call, children
from tests.redis.engines import Engine
from tests.redis.resp import Resp
from tests.redis.servers import wait_until


@pytest.fixture
def binary() -> Binary:
    """The server program that users of the embedded store get."""
    return find_binary()


def test_data_is_there_after_a_restart(each_engine: Engine, tmp_path: Path) -> None:
    """Confirmed data are still there after the directory of an embedded store is opened again (A1)."""
    with EmbeddedRedis(tmp_path / "store", binary=binary_of(each_engine)) as redis:
        assert call(redis, "SET", "key", "value") == "OK"
        pid = redis.pid
    assert pid is not None
    assert not alive(pid)
    with EmbeddedRedis(tmp_path / "store", binary=binary_of(each_engine)) as redis:
        assert call(redis, "GET", "key") == b"value"
        assert redis.pid != pid


def test_settings_are_those_of_a_queue(each_engine: Engine, tmp_path: Path) -> None:
    """With each engine, the server has the same settings: append-only file, no eviction, no port.

    Only the owner can access its directory, its socket and its files, also those of an earlier version.
    """
    expected = {
        "port": "0",
        "unixsocket": "redis.sock",
        "unixsocketperm": "600",
        "daemonize": "no",
        "databases": "1",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
        "maxmemory": "0",
        "loglevel": "notice",
        "always-show-logo": "no",
        "aof-use-rdb-preamble": "yes",
        "aof-load-truncated": "yes",
        "no-appendfsync-on-rewrite": "no",
    }
    folder = tmp_path / "store"
    folder.mkdir(mode=0o700)
    (folder / "redis.conf").touch(mode=0o644)
    with EmbeddedRedis(folder, binary=binary_of(each_engine)) as redis:
        settings = {name: call(redis, "CONFIG", "GET", name) for name in expected}
        modes = {path: path.stat().st_mode for path in [folder, *folder.rglob("*")]}
    assert settings == {name: [name.encode(), value.encode()] for name, value in expected.items()}
    assert not [path for path, mode in modes.items() if mode & 0o077]


def test_own_settings_are_kept(binary: Binary, tmp_path: Path) -> None:
    """Settings in extra.conf take effect, and the file is not changed."""
    extra = tmp_path / "store" / "extra.conf"
    extra.parent.mkdir(mode=0o700)
    extra.write_text("appendfsync always\n")
    with EmbeddedRedis(extra.parent, binary=binary) as redis:
        assert call(redis, "CONFIG", "GET", "appendfsync") == [b"appendfsync", b"always"]
    assert extra.read_text() == "appendfsync always\n"


def test_killed_server_is_started_again(binary: Binary, tmp_path: Path) -> None:
    """If the server of an embedded store is killed, it is restarted with the same URL and its data (fault B1)."""
    (tmp_path / "extra.conf").write_text("appendfsync always\n")
    with EmbeddedRedis(tmp_path, binary=binary) as redis:
        url, pid = redis.url, redis.pid
        call(redis, "SET", "key", "value")
        for _ in range(2):
            pid = redis.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda pid=pid: redis.pid not in {None, pid}, "another process")  # type: ignore[misc]
            wait_until(lambda: call(redis, "GET", "key") == b"value", "the data")
        assert (redis.url, redis.starts) == (url, 3)
    assert redis.pid is None


def test_loading_is_waited_for(binary: Binary, tmp_path: Path) -> None:
    """Starting the embedded store waits until its data are loaded (fault B11)."""
    with EmbeddedRedis(tmp_path, binary=binary) as redis, ask(redis) as connection:
        connection.pipeline([("RPUSH", f"list:{n % 100}", "x" * 50) for n in range(5_000)])
    slow = "key-load-delay 10\nloading-process-events-interval-bytes 1024\n"
    (tmp_path / "extra.conf").write_text(slow)
    with EmbeddedRedis(tmp_path, binary=binary) as redis:
        assert call(redis, "DBSIZE") == 100


_OWNER = """
import sys, time
from pathlib import Path
from taskqueue_redis.embedded.binaries import inspect
from taskqueue_redis.embedded.server import EmbeddedRedis
redis = EmbeddedRedis(sys.argv[1], binary=inspect(Path(sys.argv[2]))).start()
print(redis.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def owner(binary: Binary, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Another process that has opened the store in ``tmp_path``, with the id of its server process."""
    words = [sys.executable, "-c", _OWNER, str(tmp_path), str(binary.path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def test_server_ends_with_its_parent(
    owner: tuple[subprocess.Popen[str], int], binary: Binary, tmp_path: Path
) -> None:
    """If the parent is killed, its server is stopped too, even if frozen.

    The directory can be opened at once.
    """
    process, pid = owner
    other = EmbeddedRedis(tmp_path, binary=binary)
    with pytest.raises(ConfigurationError, match=f"in use by process {process.pid}"):
        other.start()
    with Resp(tmp_path / "redis.sock") as connection:
        connection.call("SET", "key", "value")
    os.kill(pid, signal.SIGSTOP)
    process.kill()
    process.wait()
    with EmbeddedRedis(tmp_path, binary=binary) as redis:
        assert not alive(pid)
        assert call(redis, "GET", "key") == b"value"


def test_server_without_parent_and_watchdog(
    owner: tuple[subprocess.Popen[str], int],
    binary: Binary,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server whose parent and watchdog were killed still locks its directory; the error names its process."""
    process, pid = owner
    (watchdog,) = set(children(process.pid)) - {pid}
    os.kill(watchdog, signal.SIGKILL)
    process.kill()
    process.wait()
    monkeypatch.setattr(server, "_LOCK_SECONDS", 0.1)
    try:
        with pytest.raises(ConfigurationError, match=f"in use by process {pid}: stop that process"):
            EmbeddedRedis(tmp_path, binary=binary).start()
        with Resp(tmp_path / "redis.sock") as connection:
            connection.call("SET", "key", "value")
    finally:
        os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not alive(pid), "the end of the server")
    with EmbeddedRedis(tmp_path, binary=binary) as redis:
        assert call(redis, "GET", "key") == b"value"


def test_everything_is_killed(
    owner: tuple[subprocess.Popen[str], int], binary: Binary, tmp_path: Path
) -> None:
    """If parent, server and watchdog are all killed, the directory can be opened at once."""
    process, pid = owner
    for one in [*children(process.pid), process.pid]:
        os.kill(one, signal.SIGKILL)
    process.wait()
    wait_until(lambda: not alive(pid), "the end of the server")
    with EmbeddedRedis(tmp_path, binary=binary) as redis:
        assert call(redis, "PING") == "PONG"


def test_long_path_gets_a_short_socket(binary: Binary, tmp_path: Path) -> None:
    """If the path is too long for a Unix socket, the socket is in a private temporary folder.

    That folder is removed when the store is closed.
    """
    deep = tmp_path / ("d" * 60) / ("e e%" * 20)
    with EmbeddedRedis(deep, binary=binary) as redis:
        assert call(redis, "SET", "key", "value") == "OK"
        place = Path(unquote(redis.url.removeprefix("unix://"))).parent
        assert place != deep
        assert not place.stat().st_mode & 0o077
    assert not place.exists()


def test_odd_path(each_engine: Engine, tmp_path: Path) -> None:
    """Spaces, quotes, percent signs and wildcards in the path are supported."""
    with EmbeddedRedis(tmp_path / "a 'b\" %41 [c] *?", binary=binary_of(each_engine)) as redis:
        assert call(redis, "SET", "key", "value") == "OK"
        assert call(redis, "CONFIG", "GET", "appendonly") == [b"appendonly", b"yes"]


def test_close_ends_a_frozen_server(binary: Binary, tmp_path: Path) -> None:
    """Closing stops a frozen server properly, and closing again does nothing."""
    redis = EmbeddedRedis(tmp_path, binary=binary).start()
    assert redis.pid is not None
    os.kill(redis.pid, signal.SIGSTOP)
    redis.close()
    redis.close()
    assert "is now ready to exit" in (tmp_path / "redis.log").read_text()


async def test_in_a_loop(binary: Binary, tmp_path: Path) -> None:
    """The async context does not block the event loop, and a start that is cancelled leaves nothing behind."""
    async with EmbeddedRedis(tmp_path, binary=binary) as redis:
        assert call(redis, "PING") == "PONG"
    redis = EmbeddedRedis(tmp_path, binary=binary)
    entering = asyncio.ensure_future(redis.__aenter__())
    await asyncio.sleep(0)
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert redis.pid is None
    async with EmbeddedRedis(tmp_path, binary=binary) as redis:
        assert call(redis, "PING") == "PONG"

"""The redis-server that the product runs by itself."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

from taskqueue_core.errors import ConfigurationError
from taskqueue_redis.binaries import Binary, look_at
from taskqueue_redis.embedded import EmbeddedRedis
from tests.redis.engines import OLDEST, Engine, find_engine
from tests.redis.resp import Resp
from tests.redis.servers import wait_until


def binary_of(engine: Engine) -> Binary:
    """Return what `EmbeddedRedis` takes."""
    return Binary(engine.binary, engine.version)


@pytest.fixture
def binary() -> Binary:
    """The main one."""
    return binary_of(find_engine())


def ask(redis: EmbeddedRedis) -> Resp:
    """Connect by the URL, as a client would."""
    return Resp(Path(unquote(redis.url.removeprefix("unix://"))))


def call(redis: EmbeddedRedis, *words: str) -> object:
    """Send one command."""
    with ask(redis) as connection:
        return connection.call(*words)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for yet does not."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, check=False)
    return bool(state.stdout.strip()) and not state.stdout.startswith(b"Z")


def test_data_is_there_after_a_restart(each_engine: Engine, tmp_path: Path) -> None:
    """What an embedded Redis was told is there when the directory is opened again (A1)."""
    with EmbeddedRedis(tmp_path / "store", binary=binary_of(each_engine)) as redis:
        assert call(redis, "SET", "key", "value") == "OK"
        pid = redis.pid
    assert pid is not None
    assert not alive(pid)
    with EmbeddedRedis(tmp_path / "store", binary=binary_of(each_engine)) as redis:
        assert call(redis, "GET", "key") == b"value"
        assert redis.pid != pid


def test_settings_are_those_of_a_queue(binary: Binary, tmp_path: Path) -> None:
    """It appends to a file, evicts nothing, listens on no port, and keeps its files to their owner."""
    with EmbeddedRedis(tmp_path / "store", binary=binary) as redis:
        settings = {
            name: call(redis, "CONFIG", "GET", name)
            for name in ("appendonly", "appendfsync", "maxmemory-policy", "port", "save")
        }
        files = [path.stat().st_mode for path in [redis.directory, *redis.directory.rglob("*")]]
    assert {name: reply[1] for name, reply in settings.items()} == {  # type: ignore[index]
        "appendonly": b"yes",
        "appendfsync": b"everysec",
        "maxmemory-policy": b"noeviction",
        "port": b"0",
        "save": b"",
    }
    private = [mode for mode in files if stat.S_ISDIR(mode) or stat.S_ISSOCK(mode)]
    assert len(private) >= 2
    assert not any(mode & 0o077 for mode in private)


def test_own_settings_are_kept(binary: Binary, tmp_path: Path) -> None:
    """Settings in extra.conf are in force, and are not written over."""
    extra = tmp_path / "store" / "extra.conf"
    extra.parent.mkdir(mode=0o700)
    extra.write_text("appendfsync always\n")
    with EmbeddedRedis(extra.parent, binary=binary) as redis:
        assert call(redis, "CONFIG", "GET", "appendfsync") == [b"appendfsync", b"always"]
    assert extra.read_text() == "appendfsync always\n"


def test_killed_server_is_started_again(binary: Binary, tmp_path: Path) -> None:
    """An embedded Redis that is killed comes back by itself, at the same URL, with its data (fault B1)."""
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
    """It is ready only once its data is loaded (fault B11)."""
    with EmbeddedRedis(tmp_path, binary=binary) as redis, ask(redis) as connection:
        connection.pipeline([("RPUSH", f"list:{n % 100}", "x" * 50) for n in range(5_000)])
    slow = "key-load-delay 10\n"
    if binary.version >= (7, 0):
        slow += "loading-process-events-interval-bytes 1024\n"
    (tmp_path / "extra.conf").write_text(slow)
    with EmbeddedRedis(tmp_path, binary=binary) as redis:
        assert call(redis, "DBSIZE") == 100


def test_directory_is_opened_once(binary: Binary, tmp_path: Path) -> None:
    """A second process is told who has the directory open; the first one is not disturbed."""
    with EmbeddedRedis(tmp_path, binary=binary) as redis:
        with pytest.raises(ConfigurationError, match=f"in use by process {os.getpid()}"):
            EmbeddedRedis(tmp_path, binary=binary).start()
        assert call(redis, "PING") == "PONG"
    EmbeddedRedis(tmp_path, binary=binary).start().close()


_OWNER = """
import sys, time
from pathlib import Path
from taskqueue_redis.binaries import look_at
from taskqueue_redis.embedded import EmbeddedRedis
redis = EmbeddedRedis(sys.argv[1], binary=look_at(Path(sys.argv[2]))).start()
print(redis.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def owner(binary: Binary, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Another process that has opened ``tmp_path``, and the id of its redis-server."""
    words = [sys.executable, "-c", _OWNER, str(tmp_path), str(binary.path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


@pytest.mark.parametrize("frozen", [False, True])
def test_server_ends_with_its_parent(
    owner: tuple[subprocess.Popen[str], int], binary: Binary, tmp_path: Path, *, frozen: bool
) -> None:
    """A parent that is killed takes its Redis with it, in order, and the directory can be opened at once."""
    process, pid = owner
    other = EmbeddedRedis(tmp_path, binary=binary)
    with pytest.raises(ConfigurationError, match=f"in use by process {process.pid}"):
        other.start()
    with Resp(tmp_path / "redis.sock") as connection:
        connection.call("SET", "key", "value")
    if frozen:
        os.kill(pid, signal.SIGSTOP)
    process.kill()
    process.wait()
    with EmbeddedRedis(tmp_path, binary=binary) as redis:
        assert not alive(pid)
        assert call(redis, "GET", "key") == b"value"


def test_long_path_gets_a_short_socket(binary: Binary, tmp_path: Path) -> None:
    """A directory too deep for a Unix socket has its socket elsewhere, for this user alone, until it is closed."""
    deep = tmp_path / ("d" * 60) / ("e e%" * 20)
    with EmbeddedRedis(deep, binary=binary) as redis:
        assert call(redis, "SET", "key", "value") == "OK"
        place = Path(unquote(redis.url.removeprefix("unix://"))).parent
        assert place != deep
        assert not place.stat().st_mode & 0o077
    assert not place.exists()


def test_odd_path(binary: Binary, tmp_path: Path) -> None:
    """Spaces and quotes in the path reach neither the settings nor the URL as they are."""
    with EmbeddedRedis(tmp_path / "a 'b\" %41", binary=binary) as redis:
        assert call(redis, "SET", "key", "value") == "OK"


def test_server_that_cannot_start_says_why(binary: Binary, tmp_path: Path) -> None:
    """The error has the server's own words, and nothing is left behind."""
    (tmp_path / "extra.conf").write_text("no-such-setting 1\n")
    with pytest.raises(ConfigurationError, match=r"did not start in .*no-such-setting"):
        EmbeddedRedis(tmp_path, binary=binary).start()
    (tmp_path / "extra.conf").unlink()
    EmbeddedRedis(tmp_path, binary=binary).start().close()


def test_newer_files_are_not_passed_over(tmp_path: Path) -> None:
    """An older Redis, which would begin empty beside a newer one's files, refuses them."""
    old, new = find_engine(OLDEST), find_engine()
    with EmbeddedRedis(tmp_path, binary=binary_of(new)) as redis:
        call(redis, "SET", "key", "value")
    with pytest.raises(ConfigurationError, match=r"written by Redis 7\.0 or newer"):
        EmbeddedRedis(tmp_path, binary=binary_of(old)).start()


def test_older_files_are_taken_over(tmp_path: Path) -> None:
    """A newer Redis reads an older one's files."""
    old, new = find_engine(OLDEST), find_engine()
    with EmbeddedRedis(tmp_path, binary=binary_of(old)) as redis:
        call(redis, "SET", "key", "value")
    with EmbeddedRedis(tmp_path, binary=binary_of(new)) as redis:
        assert call(redis, "GET", "key") == b"value"


def test_directory_that_others_can_write_is_refused(binary: Binary, tmp_path: Path) -> None:
    """Nobody else can put files under a Redis."""
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigurationError, match="chmod go-w"):
        EmbeddedRedis(tmp_path, binary=binary).start()


def test_directory_that_cannot_be_made(binary: Binary, tmp_path: Path) -> None:
    """A path below a file is refused in one sentence."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"cannot be made: Not a directory"):
        EmbeddedRedis(tmp_path / "file" / "store", binary=binary).start()


def test_close_ends_a_frozen_server(binary: Binary, tmp_path: Path) -> None:
    """Closing ends a server that was held still, in order, and closing again does nothing."""
    redis = EmbeddedRedis(tmp_path, binary=binary).start()
    assert redis.pid is not None
    os.kill(redis.pid, signal.SIGSTOP)
    start = time.monotonic()
    redis.close()
    redis.close()
    assert time.monotonic() - start < 5
    assert "Redis is now ready to exit" in (tmp_path / "redis.log").read_text()


async def test_in_a_loop(binary: Binary, tmp_path: Path) -> None:
    """As an async context it holds up nobody, and a start that is cancelled leaves nothing behind."""
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


def test_binary_is_what_runs(binary: Binary, tmp_path: Path) -> None:
    """What is no redis-server is not taken for one."""
    assert look_at(binary.path) == binary
    assert look_at(Path("/bin/sh")) is None
    assert look_at(tmp_path / "absent") is None

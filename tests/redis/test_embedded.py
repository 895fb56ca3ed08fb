"""The embedded store: a server that the product runs itself."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

from taskqueue_core.errors import ConfigurationError
from taskqueue_redis import embedded
from taskqueue_redis.binaries import Binary, find_binary, look_at
from taskqueue_redis.embedded import EmbeddedRedis
from tests.redis.engines import Engine
from tests.redis.resp import Resp
from tests.redis.servers import wait_until


def binary_of(engine: Engine) -> Binary:
    """Return what `EmbeddedRedis` takes."""
    found = look_at(engine.binary)
    assert found is not None
    return found


@pytest.fixture
def binary() -> Binary:
    """The one that users get."""
    return find_binary()


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
    """What an embedded store has confirmed is there when the directory is opened again (A1)."""
    with EmbeddedRedis(tmp_path / "store", binary=binary_of(each_engine)) as redis:
        assert call(redis, "SET", "key", "value") == "OK"
        pid = redis.pid
    assert pid is not None
    assert not alive(pid)
    with EmbeddedRedis(tmp_path / "store", binary=binary_of(each_engine)) as redis:
        assert call(redis, "GET", "key") == b"value"
        assert redis.pid != pid


def test_settings_are_those_of_a_queue(each_engine: Engine, tmp_path: Path) -> None:
    """Each setting means the same to every server: it appends to a file, evicts nothing, and listens on no port.

    Its files are its owner's alone.
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
    with EmbeddedRedis(tmp_path / "store", binary=binary_of(each_engine)) as redis:
        settings = {name: call(redis, "CONFIG", "GET", name) for name in expected}
        files = [path.stat().st_mode for path in [redis.directory, *redis.directory.rglob("*")]]
    assert settings == {
        name: [name.encode(), value.encode()] for name, value in expected.items()
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
    """An embedded store that is killed is started again, at the same URL, with its data (fault B1)."""
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
    """The store is ready only once its data is loaded (fault B11)."""
    with EmbeddedRedis(tmp_path, binary=binary) as redis, ask(redis) as connection:
        connection.pipeline([("RPUSH", f"list:{n % 100}", "x" * 50) for n in range(5_000)])
    slow = "key-load-delay 10\nloading-process-events-interval-bytes 1024\n"
    (tmp_path / "extra.conf").write_text(slow)
    with EmbeddedRedis(tmp_path, binary=binary) as redis:
        assert call(redis, "DBSIZE") == 100


def test_directory_is_opened_once(binary: Binary, tmp_path: Path) -> None:
    """The error of a second process names the one that has the directory open; the first is not disturbed."""
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
    """Another process that has opened ``tmp_path``, and the id of its server."""
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
    """If a parent is killed, its server ends in order, and the directory can be opened at once."""
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


def children(pid: int) -> list[int]:
    """Return the ids of a process's children that run."""
    words = ["ps", "-A", "-o", "pid=,ppid=,stat="]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as listing:
        assert listing.stdout is not None
        rows = [line.split() for line in listing.stdout]
    return [
        int(child)
        for child, parent, state in rows
        if int(parent) == pid and int(child) != listing.pid and not state.startswith("Z")
    ]


def test_server_without_parent_and_watchdog(
    owner: tuple[subprocess.Popen[str], int],
    binary: Binary,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that nobody ends any more still holds its directory; the error names the server's process."""
    process, pid = owner
    (watchdog,) = set(children(process.pid)) - {pid}
    os.kill(watchdog, signal.SIGKILL)
    process.kill()
    process.wait()
    monkeypatch.setattr(embedded, "_LOCK_SECONDS", 0.1)
    with pytest.raises(ConfigurationError, match=f"in use by process {pid}: end that"):
        EmbeddedRedis(tmp_path, binary=binary).start()
    with Resp(tmp_path / "redis.sock") as connection:
        connection.call("SET", "key", "value")
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
    """The error has product, version and the last lines of the server's log."""
    (tmp_path / "extra.conf").write_text("no-such-setting 1\n")
    words = f"{binary.name} did not start in .*no-such-setting"
    with pytest.raises(ConfigurationError, match=words):
        EmbeddedRedis(tmp_path, binary=binary).start()


def bad_setting(directory: Path) -> None:
    """The server refuses its settings."""
    (directory / "extra.conf").write_text("no-such-setting 1\n")


def no_settings_file(directory: Path) -> None:
    """The file of settings cannot be written."""
    (directory / "redis.conf").mkdir()


def no_log(directory: Path) -> None:
    """The log cannot be written."""
    (directory / "redis.log").mkdir()


def no_lock(directory: Path) -> None:
    """The lock cannot be opened."""
    (directory / "lock").mkdir()


def no_socket(directory: Path) -> None:
    """The server cannot listen, and ends."""
    (directory / "redis.sock" / "file").mkdir(parents=True)


def damaged_file(directory: Path) -> None:
    """The server cannot read its files, and ends."""
    (directory / "appendonlydir").mkdir()
    (directory / "appendonlydir" / "appendonly.aof.manifest").write_text("no manifest\n")


def not_executable(directory: Path) -> Binary:
    """The program was removed or changed after it was found."""
    (directory / "valkey-server").write_text("no program")
    return Binary(directory / "valkey-server", "Valkey", (9, 1, 2))


def ends_at_once(directory: Path) -> Binary:
    """The program prints a version, and does not serve."""
    (directory / "valkey-server").write_text("#!/bin/sh\nexit 3\n")
    (directory / "valkey-server").chmod(0o700)
    return Binary(directory / "valkey-server", "Valkey", (9, 1, 2))


FAILURES = [
    bad_setting,
    no_settings_file,
    no_log,
    no_lock,
    no_socket,
    damaged_file,
    not_executable,
    ends_at_once,
]


def leftovers() -> tuple[set[str], list[int], int]:
    """Return this process's open files, children and threads, after unused objects had to warn."""
    gc.collect()
    return set(os.listdir("/dev/fd")), children(os.getpid()), threading.active_count()


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        *(pytest.param(spoil, "store", id=spoil.__name__) for spoil in FAILURES),
        pytest.param(bad_setting, "long" * 25, id="socket_elsewhere"),
    ],
)
def test_failed_start_leaves_nothing(
    spoil: Callable[[Path], Binary | None],
    name: str,
    binary: Binary,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However a start fails, no process, thread, open file, lock or temporary folder remains, and nothing warns."""
    directory = tmp_path / name
    directory.mkdir(mode=0o700)
    own = spoil(directory)
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:  # noqa: S108 - a socket's path must be short
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        before = leftovers()
        redis = EmbeddedRedis(directory, binary=own or binary)
        with pytest.raises(ConfigurationError, match=re.escape(str(directory))) as caught:
            redis.start()
        assert "\n" not in str(caught.value)
        assert redis.pid is None
        del redis, caught
        assert leftovers() == before
        assert os.listdir(temporary) == []
    if spoil is not no_lock:
        with (directory / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_directory_in_use_leaves_nothing(binary: Binary, tmp_path: Path) -> None:
    """A start that fails because another process has the directory closes what it opened."""
    with EmbeddedRedis(tmp_path, binary=binary):
        before = leftovers()
        with pytest.raises(ConfigurationError, match="in use"):
            EmbeddedRedis(tmp_path, binary=binary).start()
        assert leftovers() == before


# Files of other versions


def test_files_of_every_version_are_taken_over(
    each_engine: Engine, binary: Binary, tmp_path: Path
) -> None:
    """The server that users get reads the files of Redis 6.2 and of every other version."""
    with EmbeddedRedis(tmp_path, binary=binary_of(each_engine)) as redis:
        call(redis, "SET", "key", "value")
        call(redis, "XADD", "stream", "1-1", "field", "value")
    with EmbeddedRedis(tmp_path, binary=binary) as redis:
        assert call(redis, "GET", "key") == b"value"
        assert call(redis, "XLEN", "stream") == 1


def test_newer_files_are_read_or_refused(
    each_engine: Engine, binary: Binary, tmp_path: Path
) -> None:
    """An older server that cannot read a newer one's files refuses them, names the writer, and changes nothing."""
    with EmbeddedRedis(tmp_path, binary=binary) as redis:
        call(redis, "SET", "key", "value")
    older = EmbeddedRedis(tmp_path, binary=binary_of(each_engine))
    if each_engine.version == binary.version:
        with older as redis:
            assert call(redis, "GET", "key") == b"value"
    else:
        with pytest.raises(ConfigurationError, match=f"written by {re.escape(binary.name)}"):
            older.start()
    with EmbeddedRedis(tmp_path, binary=binary) as redis:
        assert call(redis, "GET", "key") == b"value"


def test_files_of_an_unknown_format(binary: Binary, tmp_path: Path) -> None:
    """The files of Redis 7.4 or newer, whose format Valkey does not have, are refused with the writer's version."""
    with EmbeddedRedis(tmp_path, binary=binary) as redis:
        call(redis, "SET", "key", "value")
    (base,) = (tmp_path / "appendonlydir").glob("*.base.rdb")
    written = base.read_bytes()
    head = rb"^VALKEY\d{3}\xfa.valkey-ver.[\d.]+"
    base.write_bytes(re.sub(head, b"REDIS0012\xfa\x09redis-ver\x057.4.1", written, flags=re.DOTALL))
    changed = base.read_bytes()
    assert changed != written
    with pytest.raises(ConfigurationError, match=r"written by Redis 7\.4\.1: install that version"):
        EmbeddedRedis(tmp_path, binary=binary).start()
    assert base.read_bytes() == changed
    base.write_bytes(written)
    with EmbeddedRedis(tmp_path, binary=binary) as redis:
        assert call(redis, "GET", "key") == b"value"


# The directory


def test_directory_that_others_can_write_is_refused(binary: Binary, tmp_path: Path) -> None:
    """A directory into which other users could put files is refused."""
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigurationError, match="chmod go-w"):
        EmbeddedRedis(tmp_path, binary=binary).start()


def test_directory_that_cannot_be_made(binary: Binary, tmp_path: Path) -> None:
    """A path below a file is refused in one sentence."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"cannot be made for .*: Not a directory"):
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

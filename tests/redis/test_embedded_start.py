"""The embedded store: starts that fail, and files written by other server versions."""

from __future__ import annotations

import fcntl
import gc
import os
import re
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from taskqueue_core.errors import ConfigurationError
from taskqueue_redis.embedded.binaries import Binary, find_binary
from taskqueue_redis.embedded.server import EmbeddedRedis
from tests.redis.embedded import binary_of, call, children
from tests.redis.engines import Engine


@pytest.fixture
def binary() -> Binary:
    """The server program that users of the embedded store get."""
    return find_binary()


def test_directory_that_others_can_write_is_refused(binary: Binary, tmp_path: Path) -> None:
    """A directory that other users can write to is refused."""
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigurationError, match="chmod go-w"):
        EmbeddedRedis(tmp_path, binary=binary).start()


def test_directory_that_cannot_be_made(binary: Binary, tmp_path: Path) -> None:
    """A directory that cannot be created raises an error with the reason."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"cannot be created for .*: Not a directory"):
        EmbeddedRedis(tmp_path / "file" / "store", binary=binary).start()


def bad_setting(directory: Path) -> None:
    """Add a setting that the server refuses."""
    (directory / "extra.conf").write_text("no-such-setting 1\n")


def no_settings_file(directory: Path) -> None:
    """Make the configuration file impossible to write."""
    (directory / "redis.conf").mkdir()


def no_log(directory: Path) -> None:
    """Make the log file impossible to write."""
    (directory / "redis.log").mkdir()


def no_lock(directory: Path) -> None:
    """Make the lock file impossible to open."""
    (directory / "lock").mkdir()


def no_socket(directory: Path) -> None:
    """Make the socket impossible to create, so that the server ends."""
    (directory / "redis.sock" / "file").mkdir(parents=True)


def damaged_file(directory: Path) -> None:
    """Damage the append-only file, so that the server ends."""
    (directory / "appendonlydir").mkdir()
    (directory / "appendonlydir" / "appendonly.aof.manifest").write_text("no manifest\n")


def not_executable(directory: Path) -> Binary:
    """Return a program that was replaced by a file that cannot be executed."""
    (directory / "valkey-server").write_text("no program")
    return Binary(directory / "valkey-server", "Valkey", (9, 1, 2))


def ends_at_once(directory: Path) -> Binary:
    """Return a program that ends at once."""
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
    """Return the open files, child processes and number of threads of this process, after a garbage collection."""
    gc.collect()
    return (
        {path.name for path in Path("/dev/fd").iterdir()},
        children(os.getpid()),
        threading.active_count(),
    )


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
    """A start that fails, for whatever reason, leaves no process, thread, open file, lock or temporary folder.

    If the server ended by itself, the error has its product, its version and the last lines of its log.
    """
    directory = tmp_path / name
    directory.mkdir(mode=0o700)
    own = spoil(directory)
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        before = leftovers()
        redis = EmbeddedRedis(directory, binary=own or binary)
        with pytest.raises(ConfigurationError, match=re.escape(str(directory))) as caught:
            redis.start()
        assert "\n" not in str(caught.value)
        if spoil is bad_setting:
            why = f"{binary.name} did not start in .*no-such-setting"
            assert re.search(why, str(caught.value))
        assert redis.pid is None
        del redis, caught
        assert leftovers() == before
        assert not list(Path(temporary).iterdir())
    if spoil is not no_lock:
        with (directory / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_directory_in_use_leaves_nothing(binary: Binary, tmp_path: Path) -> None:
    """A directory can be opened only once: a second start fails, names the process, and leaves nothing open.

    The first store is not affected.
    """
    with EmbeddedRedis(tmp_path, binary=binary) as redis:
        before = leftovers()
        with pytest.raises(ConfigurationError, match=f"in use by process {os.getpid()}"):
            EmbeddedRedis(tmp_path, binary=binary).start()
        assert leftovers() == before
        assert call(redis, "PING") == "PONG"
    EmbeddedRedis(tmp_path, binary=binary).start().close()


@pytest.mark.oldest
def test_files_of_every_version_are_taken_over(
    each_engine: Engine, binary: Binary, tmp_path: Path
) -> None:
    """The server that users get reads the files written by each engine, the oldest included."""
    with EmbeddedRedis(tmp_path, binary=binary_of(each_engine)) as redis:
        call(redis, "SET", "key", "value")
        call(redis, "XADD", "stream", "1-1", "field", "value")
    with EmbeddedRedis(tmp_path, binary=binary) as redis:
        assert call(redis, "GET", "key") == b"value"
        assert call(redis, "XLEN", "stream") == 1


@pytest.mark.oldest
def test_newer_files_are_read_or_refused(
    each_engine: Engine, binary: Binary, tmp_path: Path
) -> None:
    """An older server refuses files that it cannot read, without changing them; the error names their writer."""
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
    """Files of Redis 7.4 or newer, which Valkey cannot read, are refused with the version that wrote them."""
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

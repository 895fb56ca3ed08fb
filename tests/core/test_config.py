"""Settings: their sources, the order of precedence, and the error messages for invalid values."""

import os
from pathlib import Path

import pytest
from pydantic import SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from taskqueue_core import config
from taskqueue_core.config import Settings, load_settings
from taskqueue_core.errors import ConfigurationError
from taskqueue_memory import MemorySettings


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run the test in an empty folder, with no ``TASKQUEUE_`` variables in the environment."""
    for name in list(os.environ):
        if name.upper().startswith("TASKQUEUE_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_defaults_need_nothing() -> None:
    """Without any settings, the memory backend is used and the server listens on loopback only."""
    settings = load_settings(Settings)
    assert (settings.backend, settings.host, settings.token) == ("memory", "127.0.0.1", None)


def test_the_environment_comes_before_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting is read from the environment, then .env, then taskqueue.toml; the default comes last."""
    (folder / "taskqueue.toml").write_text('backend = "a"\nport = 1\nlease = 7', encoding="utf-8")
    (folder / ".env").write_text("TASKQUEUE_BACKEND=b\nTASKQUEUE_PORT=2\n", encoding="utf-8")
    monkeypatch.setenv("TASKQUEUE_BACKEND", "c")
    settings = load_settings(Settings)
    assert (settings.backend, settings.port, settings.lease, settings.grace) == ("c", 2, 7, 0.5)


def test_other_programs_settings_are_left_alone(folder: Path) -> None:
    """Unknown names in .env and taskqueue.toml are ignored, because other programs may use the same files."""
    (folder / ".env").write_text("OTHER=1\nTASKQUEUE_UNHEARD=1\n", encoding="utf-8")
    (folder / "taskqueue.toml").write_text("unheard = 1\n[table]\na = 1", encoding="utf-8")
    assert load_settings(Settings) == Settings()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "hunter2"),
        ("PORT", "-1"),
        ("PORT", "65536"),
        ("LEASE", "0"),
        ("LEASE", "nan"),
        ("LEASE", "inf"),
        ("GRACE", "-0.1"),
        ("DRAIN", "hunter2"),
    ],
)
def test_bad_values_are_named_not_shown(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error names the variable with the invalid value, but does not show the value, which may be a secret."""
    monkeypatch.setenv(f"TASKQUEUE_{name}", value)
    with pytest.raises(
        ConfigurationError, match=rf"^invalid settings: TASKQUEUE_{name}: "
    ) as caught:
        load_settings(Settings)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_all_bad_values_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One error lists all invalid settings."""
    monkeypatch.setenv("TASKQUEUE_PORT", "x")
    monkeypatch.setenv("TASKQUEUE_LEASE", "y")
    with pytest.raises(ConfigurationError, match=r"TASKQUEUE_PORT: .*; TASKQUEUE_LEASE: "):
        load_settings(Settings)


def test_secrets_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token appears in no text form of the settings: repr, str, JSON or formatted."""
    monkeypatch.setenv("TASKQUEUE_TOKEN", "hunter2")
    settings = load_settings(Settings)
    assert isinstance(settings.token, SecretStr)
    assert settings.token.get_secret_value() == "hunter2"
    for text in (repr(settings), str(settings), settings.model_dump_json(), f"{settings.token}"):
        assert "hunter2" not in text


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("metrics", {"metrics"}),
        ("metrics,traces", {"metrics", "traces"}),
        (" metrics , traces ,", {"metrics", "traces"}),
        ("", set()),
        (",", set()),
    ],
)
def test_lists_in_the_environment(
    text: str, names: set[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list in an environment variable is separated by commas; an empty variable is an empty list."""
    monkeypatch.setenv("TASKQUEUE_PLUGINS_ALLOW", text)
    (folder / ".env").write_text(f"TASKQUEUE_PLUGINS_DENY={text}", encoding="utf-8")
    settings = load_settings(Settings)
    assert settings.plugins_allow == settings.plugins_deny == frozenset(names)


def test_lists_in_toml(folder: Path) -> None:
    """Lists in taskqueue.toml are arrays."""
    (folder / "taskqueue.toml").write_text('plugins_allow = ["a", "b"]', encoding="utf-8")
    settings = load_settings(Settings)
    assert settings.plugins_allow == frozenset({"a", "b"})


def test_an_unset_list_allows_all() -> None:
    """An unset list is None, which allows all plugins; an empty list allows none."""
    assert load_settings(Settings).plugins_allow is None


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("taskqueue.toml", b"backend = hunter2"),
        ("taskqueue.toml", b'backend = "\xffhunter2"'),
        (".env", b"TASKQUEUE_TOKEN=\xffhunter2"),
    ],
)
def test_files_that_cannot_be_read(folder: Path, file: str, content: bytes) -> None:
    """A settings file that cannot be parsed is a configuration error that does not show the file's content."""
    (folder / file).write_bytes(content)
    with pytest.raises(ConfigurationError, match="cannot read the settings") as caught:
        load_settings(Settings)
    assert "hunter2" not in str(caught.value)


class Nested(BaseSettings):
    """Settings of a third-party backend, which have a prefix of their own."""

    model_config = SettingsConfigDict(env_prefix="TOY_")

    names: list[str] = []


def test_json_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings classes of third-party backends get the same errors, without the invalid value."""
    monkeypatch.setenv("TOY_NAMES", "[hunter2")
    with pytest.raises(ConfigurationError, match="names") as caught:
        load_settings(Nested)
    assert "hunter2" not in str(caught.value)


def test_backends_have_settings_of_their_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of each backend have their own prefix, and are read from .env too."""
    (folder / ".env").write_text("TASKQUEUE_MEMORY_JOURNAL=a.jsonl", encoding="utf-8")
    assert load_settings(MemorySettings).journal == Path("a.jsonl")
    monkeypatch.setenv("TASKQUEUE_MEMORY_JOURNAL", "b.jsonl")
    assert load_settings(MemorySettings).journal == Path("b.jsonl")


def test_a_misspelt_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """U4: a misspelt variable is one warning per process, which names the nearest setting, of backends too."""
    monkeypatch.setattr(config, "_reported", set())
    for name in ("SERVR_URL", "REDIS_PASWORD", "OLD_REDIS_URI", "URL", "UNRELATED_PACKAGE_OPTION"):
        monkeypatch.setenv(f"TASKQUEUE_{name}", "secret")
    for name in ("REDIS_URL", "OLD_REDIS_PASSWORD", "DISPATCH_LEASE", "SECRETS_DIR"):
        monkeypatch.setenv(f"TASKQUEUE_{name}", "")
    load_settings(Settings)
    load_settings(Settings)
    assert [record.message.split("did you mean")[1] for record in caplog.records] == [
        " TASKQUEUE_OLD_REDIS_URL?",
        " TASKQUEUE_REDIS_PASSWORD?",
        " TASKQUEUE_SERVER_URL?",
        " TASKQUEUE_SERVER_URL?",
    ]
    assert "secret" not in caplog.text

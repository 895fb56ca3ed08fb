"""Tests of settings in files, which is how containers and systemd pass secrets."""

from __future__ import annotations

from pathlib import Path

import pytest

from taskqueue_core.config import Settings, load_settings
from taskqueue_core.errors import ConfigurationError
from taskqueue_redis import RedisSettings


def test_a_setting_may_be_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Security 24: a secret can be read from a file instead of the environment.

    An environment variable has precedence.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TASKQUEUE_TOKEN", raising=False)
    monkeypatch.delenv("TASKQUEUE_REDIS_URL", raising=False)
    folder = tmp_path / "secrets"
    folder.mkdir()
    (folder / "taskqueue_token").write_text("of-the-file\n")
    (folder / "taskqueue_redis_url").write_text("redis://127.0.0.1:7777\n")
    (folder / "else").write_text("another's")
    monkeypatch.setenv("TASKQUEUE_SECRETS_DIR", str(folder))
    token = load_settings(Settings).token
    assert token is not None
    assert token.get_secret_value() == "of-the-file"
    assert load_settings(RedisSettings).url.get_secret_value() == "redis://127.0.0.1:7777"
    monkeypatch.setenv("TASKQUEUE_TOKEN", "of-the-environment")
    token = load_settings(Settings).token
    assert token is not None
    assert token.get_secret_value() == "of-the-environment"


def test_a_folder_that_is_absent_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A secrets folder that does not exist raises an error that names it."""
    monkeypatch.setenv("TASKQUEUE_SECRETS_DIR", str(tmp_path / "absent"))
    with pytest.raises(ConfigurationError, match="TASKQUEUE_SECRETS_DIR"):
        load_settings(Settings)

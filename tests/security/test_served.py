"""A server process that is open to other machines, with tokens and TLS."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from taskqueue_cli import main
from tests.server.access import ADMIN, A, entry, write
from tests.server.tls import make_files

SERVE = ("serve", "--port", "0", "--backend", "taskqueue_memory")


@pytest.fixture(autouse=True)
def _nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove the settings of the machine."""
    for name in os.environ:
        if name.startswith("TASKQUEUE_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_for_any_host_with_tokens_and_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Security 3, 5 and 6: a server with tokens and TLS may listen on every address.

    A changed token file applies after SIGHUP.
    """
    files = make_files(tmp_path)
    path = write(tmp_path / "tokens.toml", entry(ADMIN, "admin"))
    log = tmp_path / "log"
    settings = {
        "TASKQUEUE_TOKENS_FILE": str(path),
        "TASKQUEUE_TLS_CERTIFICATE": str(files.good),
        "TASKQUEUE_TLS_KEY": str(files.key),
    }
    command = [sys.executable, "-m", "taskqueue_cli", *SERVE, "--json", "--host", "0.0.0.0"]  # noqa: S104 - the page about security shows it
    with (
        log.open("wb") as stderr,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, env=os.environ | settings
        ) as server,
    ):
        try:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["url"]
            assert url.startswith("https://0.0.0.0:")
            url = url.replace("0.0.0.0", "localhost")  # noqa: S104 - the server is bound to all addresses
            publish = ("publish", "a", "--id", "1", "--server", url, "--json")
            assert main(publish) == 4, "the certificate authority is unknown"
            monkeypatch.setenv("TASKQUEUE_TLS_CA", str(files.authority))
            monkeypatch.setenv("TASKQUEUE_TOKEN", ADMIN)
            capsys.readouterr()
            assert main(publish) == 0
            assert json.loads(capsys.readouterr().out)["status"] == "accepted"

            write(path, entry(A, "a", keys=["a"]))
            server.send_signal(signal.SIGHUP)
            end = time.monotonic() + 60
            while "tokens file reloaded" not in log.read_text():
                assert time.monotonic() < end
                time.sleep(0.02)
            assert main(publish) == 2
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
        finally:
            server.kill()
    text = log.read_text()
    assert "no authentication" not in text
    assert A not in text
    assert ADMIN not in text


def test_a_file_for_all_eyes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Security 26: the server does not start with a token file that others can read, and says how to fix it."""
    path = write(tmp_path / "tokens.toml", entry(ADMIN, "admin"))
    path.chmod(0o644)
    monkeypatch.setenv("TASKQUEUE_TOKENS_FILE", str(path))
    assert main(SERVE) == 2
    assert "chmod 600" in capsys.readouterr().err

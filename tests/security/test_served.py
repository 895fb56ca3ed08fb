"""Servers as operators start them: open on loopback, or with tokens and TLS for everybody."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.server.access import ADMIN, A, entry, write
from tests.server.tls import make_files

ROOT = Path(__file__).parents[2]


@contextmanager
def serving(log: Path, *words: str, **variables: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Run ``taskqueue serve`` with these settings; the process, and what it told when it was ready."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TASKQUEUE_")}
    command = [sys.executable, "-m", "taskqueue_core.cli", "serve", "--port", "0", "--json", *words]
    with (
        log.open("wb") as stderr,
        subprocess.Popen(
            [*command, "--backend", "taskqueue_memory"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=kept | variables,
        ) as started,
    ):
        try:
            assert started.stdout is not None
            yield started, json.loads(started.stdout.readline() or b"{}")
            started.send_signal(signal.SIGTERM)
            assert started.wait(20) == 0
        finally:
            started.kill()


def asked(url: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command against a server."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TASKQUEUE_")}
    return subprocess.run(
        [sys.executable, "-m", "taskqueue_core.cli", *words, "--server", url, "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=kept | variables,
        timeout=30,
    )


def test_an_open_server_says_that_it_is(tmp_path: Path) -> None:
    """Security 3: it is on loopback, lets everybody in, and tells whoever started it."""
    log = tmp_path / "log"
    with serving(log) as (_, told):
        assert told["url"].startswith("http://127.0.0.1:")
        assert "no authentication" in log.read_text()
        assert "taskqueue token new" in log.read_text()


def test_for_everybody_with_tokens_and_tls(tmp_path: Path) -> None:
    """Security 3, 5 and 6: any host, https, tokens alone; a new file counts at once when it is asked for."""
    files = make_files(tmp_path)
    path = write(tmp_path / "tokens.toml", entry(ADMIN, "admin"))
    log = tmp_path / "log"
    settings = {
        "TASKQUEUE_TOKENS_FILE": str(path),
        "TASKQUEUE_TLS_CERTIFICATE": str(files.good),
        "TASKQUEUE_TLS_KEY": str(files.key),
    }
    with serving(log, "--host", "0.0.0.0", **settings) as (process, told):  # noqa: S104 - as the page has it
        assert told["url"].startswith("https://0.0.0.0:")
        url = told["url"].replace("0.0.0.0", "localhost")  # noqa: S104 - as above
        trust = {"TASKQUEUE_TLS_CA": str(files.authority)}
        assert asked(url, "publish", "a", "--id", "1").returncode == 4, "an unknown authority"
        done = asked(url, "publish", "a", "--id", "1", TASKQUEUE_TOKEN=ADMIN, **trust)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["status"] == "accepted"

        write(path, entry(A, "a", keys=["a"]))
        process.send_signal(signal.SIGHUP)
        end = time.monotonic() + 10
        while "the tokens were read anew" not in log.read_text():
            assert time.monotonic() < end
            time.sleep(0.02)
        assert asked(url, "publish", "a", TASKQUEUE_TOKEN=ADMIN, **trust).returncode == 2
    text = log.read_text()
    assert "no authentication" not in text
    assert A not in text
    assert ADMIN not in text


def test_a_file_for_all_eyes(tmp_path: Path) -> None:
    """Security 26: the server does not start with it, and says what to do."""
    path = write(tmp_path / "tokens.toml", entry(ADMIN, "admin"))
    path.chmod(0o644)
    words = [sys.executable, "-m", "taskqueue_core.cli", "serve", "--backend", "taskqueue_memory"]
    variables = os.environ | {"TASKQUEUE_TOKENS_FILE": str(path)}
    done = subprocess.run(
        [*words, "--port", "0"],
        capture_output=True,
        text=True,
        check=False,
        env=variables,
        timeout=30,
    )
    assert done.returncode == 2
    assert "chmod 600" in done.stderr

"""The whole demonstration, as users start it: a server, workers, a kill, and the account."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

BACKEND = "taskqueue_memory:create_backend"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """About sixty files, some of them odd."""
    folder = tmp_path / "files"
    folder.mkdir()
    for n in range(57):
        (folder / f"file {n}.txt").write_text(f"line of {n}\n" * (n * 37))
    (folder / "empty").touch()
    (folder / "large").write_bytes(os.urandom(3_000_000))
    (folder / "umläut \u2603 'quoted'").write_text("x")
    return folder


@contextmanager
def demo(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A run in a session of its own, with its temporary files beside its input."""
    scratch = folder.parent / "scratch"
    scratch.mkdir(exist_ok=True)
    with subprocess.Popen(
        [sys.executable, "-m", "taskqueue_cli", "demo", str(folder), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(scratch)},
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def left_over(folder: Path, pids: list[int]) -> list[object]:
    """What a run should not have left: files of its own, and processes."""
    return [*(folder.parent / "scratch").iterdir(), *filter(alive, pids)]


def alive(pid: int) -> bool:
    """Whether a process is there."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def pids_in(text: str) -> list[int]:
    """The processes that the events name."""
    return [int(part.partition(")")[0]) for part in text.split("(pid ")[1:]]


def test_every_task_is_accounted_for(folder: Path) -> None:
    """OPEN-A5, D4, C16 and C26, law 1.

    A worker that is killed while it holds deliveries is noticed, another one gets them, and none of
    their tasks fails. Failed attempts are retried, the poison alone is given up with its reason,
    what was published twice is stored once; the ledger balances and every result is right.
    """
    with demo(folder, "--json", "--backend", BACKEND) as process:
        out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    told = json.loads(out)
    assert all(check["holds"] for check in told["checks"])
    assert told["ok"]
    assert told["backend"] == BACKEND
    counts = (told["files"], told["published"], told["done"], told["dead"])
    assert counts == (60, 61, 60, 1)
    assert told["ledger"]["balanced"]
    assert told["killed"]["held"] >= 1
    assert told["lost"] == told["redelivered"] == told["killed"]["held"]
    assert told["delivered"] == told["published"] + told["retried"] + told["redelivered"]
    (letter,) = told["dead_letters"]
    assert (letter["reason"], letter["attempts"]) == ("max_retries_exceeded", 3)
    assert told["duplicates"] > 0
    assert (told["compared"], told["mismatches"], told["changed"]) == (60, 0, 0)
    assert len(pids_in(err)) >= 4
    assert left_over(folder, pids_in(err)) == []


def connected(process: subprocess.Popen[str]) -> list[int]:
    """Wait until a worker is there; return the processes that were started."""
    assert process.stdout is not None
    shown = ""
    while "connected" not in shown:
        line = process.stdout.readline()
        assert line, process.stderr and process.stderr.read()
        shown += line
    pids = pids_in(shown)
    assert len(pids) == 2
    assert all(map(alive, pids))
    return pids


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_an_interrupt_ends_what_was_started(number: signal.Signals, folder: Path) -> None:
    """Ctrl-C ends the server and the workers with the run, and its files go as well."""
    with demo(folder, "--keep-going", "--backend", BACKEND, "--workers", "1") as process:
        pids = connected(process)
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert left_over(folder, pids) == []


def test_a_killed_run_leaves_no_process(folder: Path) -> None:
    """A run that ends without a chance to clean up takes its server and its workers with it."""
    with demo(folder, "--keep-going", "--backend", BACKEND, "--workers", "1") as process:
        pids = connected(process)
        process.kill()
        process.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))


@pytest.mark.long
def test_afterwards_it_stays_if_asked_to(folder: Path) -> None:
    """With --keep-going the server can be looked at until Ctrl-C, and the verdict is the run's."""
    with demo(folder, "--keep-going", "--json", "--backend", BACKEND, "--limit", "3") as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        assert told["ok"]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "")
    assert left_over(folder, pids_in(err)) == []


def test_a_server_that_cannot_start_is_reported(folder: Path) -> None:
    """The server's own reason and exit code are passed on."""
    with demo(folder, "--json", "--backend", "no_such_backend") as process:
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "no_such_backend" in json.loads(out)["error"]["detail"]
    assert left_over(folder, []) == []

"""The whole demonstration as a process: a server, workers, a killed worker and the report."""

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
    """A folder with sixty files, some of them with unusual names or sizes."""
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
    """Run the demonstration in its own process session, with its temporary files next to its input."""
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
    """Return the temporary files and processes that remain after a run."""
    return [*(folder.parent / "scratch").iterdir(), *filter(alive, pids)]


def alive(pid: int) -> bool:
    """Return whether a process exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def pids_in(text: str) -> list[int]:
    """Return the process ids that the printed events contain."""
    return [int(part.partition(")")[0]) for part in text.split("(pid ")[1:]]


def test_every_task_is_accounted_for(folder: Path) -> None:
    """OPEN-A5, D4, C16 and C26, law 1: every task of the demonstration is accounted for.

    A worker that is killed while it holds deliveries is noticed, another worker gets them, and none of their tasks
    fails. Failed attempts are retried, only the poison task becomes a dead letter with its reason, and tasks that
    are published twice are stored once. The ledger balances and every result is right.
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
    """Wait until a worker is connected; return the ids of the processes that were started."""
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
    """Ctrl-C ends the demonstration together with its server and workers, and removes its files."""
    with demo(folder, "--keep-going", "--backend", BACKEND, "--workers", "1") as process:
        pids = connected(process)
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert left_over(folder, pids) == []


def test_a_killed_run_leaves_no_process(folder: Path) -> None:
    """If the demonstration is killed, its server and workers end as well."""
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
    """With --keep-going the server stays up until Ctrl-C, and the exit code is still that of the run."""
    with demo(folder, "--keep-going", "--json", "--backend", BACKEND, "--limit", "3") as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        assert told["ok"]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "")
    assert left_over(folder, pids_in(err)) == []


def test_a_server_that_cannot_start_is_reported(folder: Path) -> None:
    """If the server cannot start, its error and exit code are passed on."""
    with demo(folder, "--json", "--backend", "no_such_backend") as process:
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "no_such_backend" in json.loads(out)["error"]["detail"]
    assert left_over(folder, []) == []

"""A killed server with a memory backend loses its tasks, but publishers and workers recover."""

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.cli.processes import process
from tests.ports import free_port
from tests.redis.servers import wait_until

COUNT = 300
ROUNDS = [0, *(pytest.param(n, marks=pytest.mark.chaos) for n in range(1, 20))]


@contextmanager
def running(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server or worker process, and wait until it has printed its start message."""
    with process(*words, stderr=subprocess.DEVNULL) as started:
        assert started.stdout is not None
        assert json.loads(started.stdout.readline())
        yield started


def done(cli: Cli, url: str) -> int:
    """Return the number of tasks that are done."""
    known = {
        stats["key"]: stats["ledger"] for stats in cli("stats", "--server", url, "--json").json
    }
    if "double" not in known:  # a new server whose worker has not reconnected yet
        return 0
    assert known["double"]["balanced"]
    return int(known["double"]["done"])


@pytest.mark.parametrize("number", ROUNDS)
def test_a_killed_server_takes_its_tasks_and_nothing_else(
    number: int, cli: Cli, tmp_path: Path
) -> None:
    """Fault A6: while the server is down, publishing fails with an error.

    Afterwards the worker reconnects by itself, and publishing the tasks again completes them.
    """
    url = f"http://127.0.0.1:{(port := free_port())}"
    serve = ("serve", "--backend", "taskqueue_memory", "--port", str(port))
    batch = tmp_path / "tasks"
    batch.write_text(
        "".join(json.dumps({"id": f"t{n}", "payload": n}) + "\n" for n in range(COUNT))
    )
    publish = ("publish", "double", "--batch", str(batch), "--server", url, "--json")
    with running(*serve) as server, running("worker", "tests.cli.work:worker", "--url", url):
        assert cli(*publish).json["accepted"] == COUNT
        wait_until(lambda: done(cli, url) > number, "some tasks are done", tick=0, seconds=60)
        server.send_signal(signal.SIGKILL)
        server.wait()
        refused = cli(*publish)
        assert refused.code == 4
        assert refused.json["error"]["code"] == "backend_unavailable"
        with running(*serve):
            assert done(cli, url) == 0
            assert cli(*publish).json["accepted"] == COUNT
            wait_until(lambda: done(cli, url) == COUNT, "the worker has reconnected", seconds=60)

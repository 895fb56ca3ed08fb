"""What volatile means: the server of the memory backend is killed in the middle of a job."""

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
    """A server or a worker that has said that it runs."""
    with process(*words, stderr=subprocess.DEVNULL) as started:
        assert started.stdout is not None
        assert json.loads(started.stdout.readline())
        yield started


def done(cli: Cli, url: str) -> int:
    """Count the tasks that are done."""
    known = {
        stats["key"]: stats["ledger"] for stats in cli("stats", "--server", url, "--json").told
    }
    if "double" not in known:  # a fresh server, and no worker is back yet
        return 0
    assert known["double"]["balanced"]
    return int(known["double"]["done"])


@pytest.mark.parametrize("number", ROUNDS)
def test_a_killed_server_takes_its_tasks_and_nothing_else(
    number: int, cli: Cli, tmp_path: Path
) -> None:
    """Fault A6: publishers are told, the worker comes back by itself, and publishing again does the job."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    serve = ("serve", "--backend", "taskqueue_memory", "--port", str(port))
    batch = tmp_path / "tasks"
    batch.write_text(
        "".join(json.dumps({"id": f"t{n}", "payload": n}) + "\n" for n in range(COUNT))
    )
    publish = ("publish", "double", "--batch", str(batch), "--server", url, "--json")
    with running(*serve) as server, running("worker", "tests.cli.work:worker", "--url", url):
        assert cli(*publish).told["accepted"] == COUNT
        wait_until(lambda: done(cli, url) > number, "some are done", tick=0, seconds=60)
        server.send_signal(signal.SIGKILL)
        server.wait()
        refused = cli(*publish)
        assert refused.code == 4
        assert refused.told["error"]["code"] == "backend_unavailable"
        with running(*serve):
            assert done(cli, url) == 0
            assert cli(*publish).told["accepted"] == COUNT
            wait_until(lambda: done(cli, url) == COUNT, "the worker came back", seconds=60)

"""``taskqueue serve`` and ``taskqueue worker`` as processes, together with other commands."""

import json
import signal
import subprocess
from contextlib import AbstractContextManager

import pytest

from tests.cli.conftest import Cli
from tests.cli.processes import process
from tests.redis.servers import wait_until


def worker(target: str, *words: str) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """Run a worker process, which is killed at the end of the block if it is still running."""
    return process("worker", f"tests.cli.work:{target}", *words)


def wait_for(cli: Cli, server: str, key: str, task_id: str, state: str) -> None:
    """Wait until a task has this state."""
    words = ("status", key, task_id, "--server", server, "--json")
    wait_until(lambda: cli(*words).json.get("state") == state, f"{task_id} is {state}", seconds=60)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_from_publish_to_result(number: signal.Signals, cli: Cli, server: str) -> None:
    """G5: a worker serves two keys over one connection, and publish, status, result and stats use the same server."""
    task_id = f"p{number}"
    with worker("worker", "--url", server, "--worker-id", f"w{number}", "--concurrency", "1") as w:
        assert w.stdout is not None
        told = json.loads(w.stdout.readline())
        assert told["keys"] == ["double", "who"]
        for key, payload in (("double", "21"), ("who", "null")):
            done = cli("publish", key, payload, "--id", task_id, "--server", server, "--json")
            assert done.json["status"] == "accepted"
            wait_for(cli, server, key, task_id, "done")
        result = cli("result", "double", task_id, "--server", server, "--json").json["result"]
        assert result == 42
        assert cli("result", "who", task_id, "--server", server).out == '{"attempt":1}\n'
        (stats,) = cli("stats", "double", "--server", server, "--json").json
        assert stats["ledger"]["balanced"]
        assert stats["subscribers"] == 1
        w.send_signal(number)
        assert w.wait(60) == 0
        assert w.stdout.read() == b""


def test_a_worker_that_only_fails_ends_with_3(cli: Cli, server: str) -> None:
    """D6: a worker whose handlers only fail stops itself and exits with 3."""
    for n in range(6):
        cli("publish", "fails", "--id", f"f{n}", "--max-attempts", "1", "--server", server)
    with worker("failing", "--url", server, "--concurrency", "1") as w:
        assert w.wait(60) == 3
        assert w.stderr is not None
        last = w.stderr.read().decode().splitlines()[-1]
    assert last.startswith("error: ")


def test_a_poison_task_ends_visibly(cli: Cli, server: str) -> None:
    """C16 and C26: a task that always fails becomes a dead letter with its error, and its status names the reason.

    The worker takes the option ``--server`` like other commands.
    """
    words = ["--max-attempts", "1", "--server", server]
    cli("publish", "double", '"not a number"', "--id", "poison", *words)
    with worker("worker", "--server", server):
        wait_for(cli, server, "double", "poison", "dead")
    letter = cli("dlq", "show", "double", "poison", "--server", server, "--json").json
    assert letter["reason"] == "invalid_payload"
    assert letter["task"]["payload"] == "not a number"
    status = cli("status", "double", "poison", "--server", server, "--json").json
    assert "invalid_payload" in status["error"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["worker", "nowhere:worker"], "nowhere"),
        (["worker", "tests.cli.work:nothing"], "nothing"),
        (["worker", "tests.cli.work:worker", "--url", "ftp://x"], "http://"),
        (["worker", "tests.cli.work:worker", "--worker-id", "a b"], "worker_id"),
        (["worker", "tests.cli.work:worker", "--local", "--url", "http://x"], "remove --url"),
        (["worker", "tests.cli.work:worker", "--backend", "nowhere"], "nowhere"),
        (["worker", "tests.cli.work:worker", "--backend", "server"], "no subscriptions"),
        (["serve", "--host", "0.0.0.0"], "loopback"),  # noqa: S104 - the command must refuse it
        (["serve", "--backend", "server"], "set --backend to a store"),
        (["serve", "--backend", "nowhere", "--port", "0"], "nowhere"),
    ],
)
def test_what_cannot_start_ends_with_2(words: list[str], said: str, cli: Cli) -> None:
    """G3, fault K4: a wrong worker module, address or backend exits with 2; with --json the error is JSON."""
    done = cli(*words, "--json")
    assert done.code == 2
    assert said in json.loads(done.out.splitlines()[-1])["error"]["detail"]
    assert "Traceback" not in done.err


def test_a_port_that_is_taken_is_reported(cli: Cli, server: str) -> None:
    """If the port is in use, the server exits with 2 and names the setting to change."""
    port = server.rpartition(":")[2]
    done = cli("serve", "--port", port, "--backend", "taskqueue_memory", "--json")
    assert done.code == 2
    assert "TASKQUEUE_PORT" in done.err

"""The page about Redis: its commands work as shown, and its tables agree with the code."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from taskqueue_conformance.suites.streams import new
from taskqueue_core.after import After, TaskRef
from taskqueue_core.capabilities import AuditEntry, Durability, Order
from taskqueue_core.rate_limit import IntervalUnit, RateLimit
from taskqueue_core.tasks import Task
from taskqueue_core.uniqueness import UniqueKey
from taskqueue_redis import RedisBackend, RedisSettings
from taskqueue_redis.scripts.assembly import source
from tests.binaries import curl
from tests.docs.programs import PATIENCE, background
from tests.ports import free_port
from tests.redis.engines import OLDEST, find_engine
from tests.redis.servers import RedisServer, wait_until

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "redis.md").read_text()
KEY = "resize"
SHARED = "shared"


def commands(*, containing: str) -> list[str]:
    """Return the commands of the page that contain a text."""
    return [line for line in re.findall(r"^\$ (.+)$", PAGE, re.MULTILINE) if containing in line]


def rows(heading: str) -> list[list[str]]:
    """Return the rows of the first table after a heading, without the table head."""
    lines = PAGE.split(f"{heading}\n", 1)[1].splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("| ---")) + 1
    end = next((n for n, line in enumerate(lines) if n > start and not line.startswith("|")), None)
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[start:end]]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    """Run a Redis server for one test."""
    with RedisServer(find_engine(), tmp_path / "redis") as server:
        yield server


@pytest.fixture
def environment(tmp_path: Path, redis: RedisServer) -> dict[str, str]:
    """Environment variables for commands of the page.

    They set PATH, a free port, and a ``redis-cli`` that connects to the Redis of this test.
    """
    binaries = tmp_path / "bin"
    binaries.mkdir()
    client = shlex.quote(str(find_engine(OLDEST).binary.with_name("redis-cli")))
    programs = {"python": shlex.quote(sys.executable), "redis-cli": f"{client} -p {redis.port}"}
    for name, command in programs.items():
        (binaries / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (binaries / name).chmod(0o700)
    return {
        "PATH": f"{binaries}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "COLUMNS": "200",
        "TASKQUEUE_PORT": str(free_port()),
        "PYTHONUNBUFFERED": "1",
    }


Shell = Callable[[str], str]


@pytest.fixture
def shell(tmp_path: Path, environment: dict[str, str]) -> Shell:
    """A function that runs a command in a shell and returns its output."""

    def run(command: str) -> str:
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode(errors="replace")

    return run


@pytest.fixture
def server(tmp_path: Path, environment: dict[str, str], redis: RedisServer) -> Iterator[str]:
    """Run the server as on the page, on the Redis of this test; yield the first line of its output."""
    (command,) = commands(containing="TASKQUEUE_REDIS_URL=redis://127.0.0.1:6379 taskqueue serve")
    words = ["/bin/sh", "-c", f"exec env {command.replace(':6379', f':{redis.port}')}"]
    quiet = {"stderr": subprocess.DEVNULL}
    with background(words, cwd=tmp_path, env=environment, **quiet) as process:
        assert process.stdout is not None
        yield process.stdout.readline()


def at_port(command: str, environment: dict[str, str]) -> str:
    """Return a command with the port of the server of this test."""
    return command.replace(":8420", f":{environment['TASKQUEUE_PORT']}")


def test_set_up(server: str, shell: Shell, environment: dict[str, str], redis: RedisServer) -> None:
    """A1, G5: two variables are enough to start a server on Redis.

    The command on the page sets the durability of a queue.
    """
    assert "serving redis" in server
    curl()
    (command,) = commands(containing="curl -X PUT")
    told = json.loads(shell(at_port(command, environment)))
    assert (told["version"], told["durability"]) == (1, "process")
    kept = {row[0].strip("`") for row in rows("## What can be lost")}
    assert kept == {*Durability, "unset"}
    assert redis.call("HGET", "{tq:0}:q:resize", "durability") == b"process"


def test_access_list(shell: Shell, tmp_path: Path, redis: RedisServer) -> None:
    """The command writes an access list, which Redis enforces once it contains a password."""
    (command,) = commands(containing="access_list")
    shell(command)
    written = (tmp_path / "taskqueue.acl").read_text()
    assert re.search(r" #0{64} ", written)
    rules = re.sub(r" #0{64} ", " >secret ", written).splitlines()
    (user,) = [line.split()[1:] for line in rules if line.startswith("user taskqueue")]
    redis.call("ACL", "SETUSER", *user)
    redis.login = ("taskqueue", "secret")
    assert redis.call("PING") == "PONG"
    with pytest.raises(Exception, match="NOPERM"):
        redis.call("FLUSHALL")
    redis.login = None


def test_a_script_is_shown_whole(shell: Shell) -> None:
    """The command prints a Lua script exactly as it is sent to Redis."""
    (command,) = commands(containing="print(source(")
    assert shell(command).rstrip("\n") == source("ack").rstrip("\n")


def test_settings_table() -> None:
    """The table contains every Redis setting with its default."""
    told = {row[0].strip("`").lower(): row[1].strip("`") for row in rows("## Settings")}
    assert list(told) == list(RedisSettings.model_fields)
    for name, field in RedisSettings.model_fields.items():
        default = field.default
        if isinstance(default, SecretStr):
            default = default.get_secret_value()
        shown = "" if default is None else str(default).lower() if default is not True else "true"
        assert told[name] == shown.removesuffix(".0"), name


@pytest.fixture
async def busy(redis: RedisServer) -> RedisServer:
    """A Redis with tasks of one queue in every state, some of them held by a consumer."""
    backend = RedisBackend(settings=RedisSettings(url=SecretStr(redis.url)))
    await keep_busy(backend)
    await backend.control.maintain()
    # Close without unsubscribing, like a process that was killed, so that the consumers stay registered.
    redis.call("RPUSH", "{tq:0}:damaged", f"{KEY} id")  # as for a damaged task
    redis.call("SET", "{tq:0}:aside:due", "x")  # as for a key of a wrong type
    await backend._context.heartbeat.aclose()
    await backend._context.wakeups.aclose()
    await backend._context.client.aclose()
    return redis


async def keep_busy(backend: RedisBackend) -> None:
    """Create every kind of key for tasks, and consumers that hold some of them."""
    settings = await backend.control.settings(KEY)
    changed = settings.model_copy(update={"journal": True, "max_inflight": 100})
    await backend.control.configure(KEY, changed)
    await backend.audit.record(AuditEntry(actor="ops", action="pause", key=KEY))
    first, second = backend.subscribe([KEY], "one"), backend.subscribe([KEY], "one")
    later = time.time() + 3600
    tasks = [Task(key=KEY, id=f"task-{n}", payload=b"{}") for n in range(8)]
    tasks += [
        Task(key=KEY, id="later", payload=b"{}", not_before=later),
        Task(key=KEY, id="until", payload=b"{}", deadline=later, priority=4),
        Task(key=KEY, id="unique", payload=b"{}", priority=4, unique=UniqueKey(key="work")),
    ]
    await backend.publisher.publish(*tasks)
    taken = (await first.receive(6, 1)).deliveries
    await first.ack(taken[0], results=[b"1"])
    await first.redeliver(taken[1])
    await first.dead_letter(taken[2], "rejected", "a reason")
    await backend.control.progress(taken[3], 0.5)
    await backend.streams.append(new(taken[3], 1))
    await second.adopt(taken[4].receipt)
    (again,) = (await first.receive(1, 1)).deliveries
    assert again.task.id == taken[1].task.id
    await first.redeliver(taken[5])
    await keep_tenants_busy(backend)
    await keep_relatives_busy(backend)


async def keep_relatives_busy(backend: RedisBackend) -> None:
    """Create every kind of key for tasks that wait for others."""
    parent, nobody = TaskRef(KEY, "parent"), TaskRef(KEY, "nobody")
    (dead,) = await backend.dead_letters.list(KEY)
    await backend.publisher.publish(
        Task(key=KEY, id="parent", batch=TaskRef(KEY, "batch"), priority=9),
        *(Task(key=KEY, after=After(tasks=(parent, nobody), when="ended")) for _ in range(20)),
        Task(key=KEY, after=After(tasks=(TaskRef(KEY, dead.task.id),))),
    )
    consumer = backend.subscribe([KEY], "four")
    (taken,) = (await consumer.receive(1, 1)).deliveries
    assert taken.task.id == "parent"
    await consumer.ack(taken)


async def keep_tenants_busy(backend: RedisBackend) -> None:
    """Create every kind of key for tenants and ordering keys in another queue."""
    settings = await backend.control.settings(SHARED)
    changed = settings.model_copy(
        update={
            "order": Order.FAIR, "weights": {"acme": 2}, "tenant_max_inflight": 1, "max_processing_time": 60.0,
            "index": ("user",),
            "tenant_rate_limit": RateLimit(max_tokens=9, interval=1, interval_unit=IntervalUnit.HOURS),
        }
    )  # fmt: skip
    await backend.control.configure(SHARED, changed)
    consumer = backend.subscribe([SHARED], "three")
    await backend.publisher.publish(
        *(Task(key=SHARED, payload=b"{}", tenant="acme") for _ in range(2)),
        *(Task(key=SHARED, payload=b"{}", tenant="brown", ordering_key="face") for _ in range(2)),
        Task(key=SHARED, id="done", payload=b"{}", tenant="clark"),
    )
    taken = (await consumer.receive(9, 1)).deliveries
    await consumer.ack(*(one for one in taken if one.task.id == "done"))
    assert not (await consumer.receive(9, 0)).deliveries
    await backend.publisher.publish(
        Task(key=SHARED, payload=b"{}", tenant="davis"),
        Task(key=SHARED, id="gone", tags=("user:1",)),
    )
    await backend.control.cancel(SHARED, "gone")


async def test_every_key_is_in_the_table(busy: RedisServer) -> None:
    """The table lists exactly the Redis keys that exist, each with its type."""
    names = {
        "P": r"\{tq:0\}",
        "Q": rf"\{{tq:0\}}:q:(?:{KEY}|{SHARED})",
        "TOKEN": "[0-9a-f]+-[0-9a-f]+",
        "TENANT": "[a-z]+",
        "ID": "[0-9a-z-]+",
        "ENTITY": "[a-z]+",
        "STATE": "(?:expired|cancelled|discarded|replaced)",
        "N": "[0-9]",
        "…": ".+",
    }
    table = {row[0].strip("`"): row[1] for row in rows("## For developers: how a task is stored")}
    patterns = {
        re.compile(
            re.sub(
                r"TOKEN|TENANT|ENTITY|STATE|ID|…|[PQ](?=[:/]|$)|N(?=:|$)",
                lambda found: names[found[0]],
                name,
            )
        ): kind
        for name, kind in table.items()
    }
    seen = set()
    for key in sorted(busy.call("KEYS", "*")):
        matching = [pattern for pattern in patterns if pattern.fullmatch(key.decode())]
        assert len(matching) == 1, key
        kind = {"zset": "sorted set"}.get(told := busy.call("TYPE", key), told)
        assert patterns[matching[0]] in {kind, "any"}, key
        seen.add(matching[0])
    assert {pattern.pattern for pattern in patterns if pattern not in seen} == set()


async def test_looking_at_a_queue(busy: RedisServer, shell: Shell) -> None:
    """Each ``redis-cli`` command on the page prints what its comment says."""
    expected = ("resize", "redelivered", "task-", "one", "later", "task-", "-", "redelivered")
    shown = commands(containing="redis-cli")
    assert len(shown) == len(expected)
    for command, text in zip(shown, expected, strict=True):
        printed = shell(command)
        if "xpending" in command:
            assert re.search(r"^[0-9a-f]{16}-[0-9a-f]{32}$", printed, re.MULTILINE), printed
        else:
            assert text in printed, command
    wait_until(lambda: busy.call("PING") == "PONG", "Redis still responds")

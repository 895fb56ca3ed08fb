"""Throughput of one socket with a limited credit, compared with a plain WebSocket, measured in turn in the same run.

The server runs on one core, the worker and Redis on another. Each measurement has its own server with a backlog, and a
minimal worker process that grants 100 credits, then settles 50 deliveries at a time and grants 50 more. It settles by
acks, and in another measurement by retries.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meter import cpu_of
from processes import RedisServer, pin

from taskqueue_core import Queue, Task
from taskqueue_remote import RemoteBackend

TASKS = 20_000
BYTES = 300
WINDOW = 100
KEY = "bench"
PATIENCE = 120.0
HERE = Path(__file__).parent


async def throughput() -> dict[str, float]:
    """Measure the plain WebSocket, the memory backend and Redis; return rates, also relative to the plain WebSocket."""
    floor = await _turn("floor", str(HERE / "window_floor.py"), str(TASKS), str(BYTES))
    turns = {"memory": await _turn("ack", *_serve("memory"))}
    retries = {"memory": await _turn("retry", *_serve("memory"))}
    for kind, measured in (("ack", turns), ("retry", retries)):
        with RedisServer() as redis:
            pin(redis.process.pid, 1)
            variables = {"TASKQUEUE_REDIS_URL": redis.url}
            measured["Redis"] = await _turn(kind, *_serve("redis"), **variables)
    found = {"bare socket, bodies/s": floor["rate"], "bare socket, server CPU, µs": floor["cpu"]}
    for name, turn in turns.items():
        found[f"{name}, tasks/s"] = turn["rate"]
        found[f"{name}, x bare socket"] = turn["rate"] / floor["rate"]
        found[f"{name}, server CPU, µs"] = turn["cpu"]
        found[f"{name}, retries/s"] = retries[name]["rate"]
        found[f"{name}, retries, x acks"] = retries[name]["rate"] / turn["rate"]
        found[f"{name}, retries, server CPU, µs"] = retries[name]["cpu"]
    return {f"one worker, credit {WINDOW}: {name}": value for name, value in found.items()}


def _serve(backend: str) -> tuple[str, ...]:
    words = ("serve", "--port", "0", "--log-level", "error", "--backend", backend, "--json")
    return ("-m", "taskqueue_cli", *words)


async def _turn(kind: str, *words: str, **variables: str) -> dict[str, float]:
    with _started(*words, **variables) as about:
        url, pid = about["url"], int(about["pid"])
        if kind != "floor":
            await _publish(url)
            url = f"{url}/v1/socket"
        pin(pid, 0)
        before = cpu_of(pid)
        found = await asyncio.to_thread(_work, kind, url)
        spent = cpu_of(pid) - before
    if found["handled"] != TASKS:
        raise SystemExit(f"invalid: {found['handled']} of {TASKS} handled")
    return {"rate": TASKS / found["seconds"], "cpu": 1e6 * spent / TASKS}


async def _publish(url: str) -> None:
    backend = RemoteBackend(url)
    body = "x" * (BYTES - 2)
    await Queue(backend).publish_many([Task.of(KEY, body) for _ in range(TASKS)])
    await backend.aclose()


def _work(kind: str, url: str) -> dict[str, Any]:
    program = str(HERE / "window_worker.py")
    words = [sys.executable, program, kind, url, str(TASKS), str(WINDOW), KEY]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as worker:
        pin(worker.pid, 1)
        try:
            said, _ = worker.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            worker.kill()
            raise
    if worker.returncode:
        raise SystemExit("invalid: the worker failed")
    found: dict[str, Any] = json.loads(said)
    return found


@contextlib.contextmanager
def _started(*words: str, **variables: str) -> Iterator[dict[str, str]]:
    child = subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    )
    try:
        assert child.stdout is not None
        about: dict[str, str] = json.loads(child.stdout.readline())
        yield about
    finally:
        child.terminate()
        child.communicate()


MEASUREMENTS = (throughput,)

"""How busy a dispatcher keeps the slots, and how soon a free slot gets its next job, compared with loops without it.

The simulated GPU server runs on one core, together with Redis; the dispatcher or the loops run on another core.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from processes import RedisServer, pin

SLOTS = 8
JOBS = 800
LOW, HIGH = 0.02, 0.2
PATIENCE = 300.0
HERE = Path(__file__).parent


async def backlog() -> dict[str, float]:
    """Measure the loops without a dispatcher, then the dispatcher on the memory backend and on Redis."""
    turns = {"bare loops": _turn("bare"), "memory": _turn("memory")}
    with RedisServer() as redis:
        turns["Redis"] = _turn(redis.url)
    return {
        f"{SLOTS} slots, jobs of {LOW * 1000:.0f} to {HIGH * 1000:.0f} ms: {name}, {figure}": value
        for name, turn in turns.items()
        for figure, value in turn.items()
    }


def _turn(how: str) -> dict[str, float]:
    words = [sys.executable, str(HERE / "dispatch_gpu.py"), str(SLOTS), str(LOW), str(HIGH)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as gpu:
        assert gpu.stdin is not None
        assert gpu.stdout is not None
        try:
            url = json.loads(gpu.stdout.readline())["url"]
            pin(gpu.pid, 0)
            found = _send(how, url)
            gpu.stdin.write("spans\n")
            gpu.stdin.flush()
            spans = json.loads(gpu.stdout.readline())
        finally:
            gpu.kill()
    if found["done"] != JOBS or len(spans) != JOBS:
        raise SystemExit(f"invalid: {found['done']} of {JOBS} done, {len(spans)} run")
    gaps = sorted(1000 * gap for gap in found["gaps"])
    return {
        "slot utilisation": _utilisation(found["spans"]),
        "slot utilisation within the server": _utilisation(spans),
        "slot free to next POST, p50 ms": median(gaps),
        "slot free to next POST, p99 ms": quantiles(gaps, n=100)[98],
    }


def _utilisation(spans: list[tuple[float, float]]) -> float:
    """Return the share of time in which slots were running a job, measured while jobs were waiting."""
    first = min(begun for begun, _ in spans)
    last = max(begun for begun, _ in spans)
    busy = sum(min(ended, last) - begun for begun, ended in spans)
    return busy / (SLOTS * (last - first))


def _send(how: str, url: str) -> dict[str, Any]:
    words = [sys.executable, str(HERE / "dispatch_run.py"), how, url, str(SLOTS), str(JOBS)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as sender:
        pin(sender.pid, 1)
        try:
            said, _ = sender.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            sender.kill()
            raise
    if sender.returncode:
        raise SystemExit("invalid: what sends the jobs failed")
    found: dict[str, Any] = json.loads(said)
    return found


MEASUREMENTS = (backlog,)

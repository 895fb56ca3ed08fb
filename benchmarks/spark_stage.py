"""Helpers that the sections share: a Spark session, and journals in Redis in the format of the backend's scripts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from processes import RedisServer
from pyspark.sql import SparkSession
from redis import Redis

from taskqueue_spark.session import session

START = 1_790_000_000_000_000
STEP = 500
"""microseconds between two steps of a generated journal"""
_STEPS = (
    ("published", "waiting", ""),
    ("delivered", "in_flight", "worker-1"),
    ("acked", "done", "worker-1"),
)


@contextmanager
def spark(cores: int = 2) -> Iterator[SparkSession]:
    """Yield a Spark session on ``cores`` cores, and stop it at the end."""
    with TemporaryDirectory(prefix="taskqueue-bench-") as folder:
        opened = session("bench", f"local[{cores},4]", **{"spark.sql.warehouse.dir": folder})
        logging.getLogger("py4j").setLevel(logging.ERROR)
        try:
            yield opened
        finally:
            opened.stop()


@contextmanager
def folder() -> Iterator[Path]:
    """Yield an empty folder, and delete it at the end."""
    with TemporaryDirectory(prefix="taskqueue-bench-") as path:
        yield Path(path)


def fill(redis: RedisServer, prefix: str, transitions: int, batch: int) -> int:
    """Write a journal in which batches of tasks are published, delivered and acked; return its number of records."""
    with Redis.from_url(redis.url) as link:
        partition = f"{{{prefix}:0}}"
        steps, seq = transitions // batch, 1
        for first in range(0, steps, 1000):
            with link.pipeline(transaction=False) as pipe:
                for step in range(first, min(first + 1000, steps)):
                    pipe.xadd(f"{partition}:journal", _entry(step, batch), id=f"{seq}-0")
                    seq += batch
                pipe.execute()
        epoch = {"epoch": "bench", "journal_seq": seq - 1, "journal_length": 100_000_000}
        link.hset(f"{partition}:meta", mapping=epoch)
    return seq - 1


def _entry(step: int, batch: int) -> dict[str, str | int]:
    of, place = divmod(step, len(_STEPS))
    event, state, worker = _STEPS[place]
    ids = "\0".join(
        f"01990d2c-5bf8-7c3e-8a4f-{of * batch + number:012d}" for number in range(batch)
    )
    return {
        "v": 2, "ts": START + step * STEP, "event": event, "key": "images", "state": state, "worker": worker,
        "reason": "", "task_id": ids, "attempt": 1, "losses": 0, "priority": 4, "tenant": "", "ordering_key": "",
        "due_at": "", "error": "",
    }  # fmt: skip

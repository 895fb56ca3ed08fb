"""Tasks that record each execution in a file, and a worker with a limit of concurrent runs: ``background.py 1``."""

import os
import sys
import time
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.task_worker import serve

MARKS = Path(os.environ["MARKS"])


def note(name: str) -> None:
    """Append a line to the file with one write."""
    with (MARKS / "executed").open("a") as file:
        file.write(f"{name}\n")


@task(persist_result=True, cache_policy=NO_CACHE)  # type: ignore[untyped-decorator] # Prefect is not in this environment
def work(name: str, seconds: float = 0) -> str:
    """Record the execution, and sleep."""
    note(name)
    time.sleep(seconds)
    return name


@task(cache_policy=NO_CACHE)  # type: ignore[untyped-decorator] # as above
def wait(name: str) -> None:
    """Record the execution, and wait until the gate file exists."""
    note(name)
    while not (MARKS / "gate").exists():
        time.sleep(0.02)


@task(retries=1, retry_delay_seconds=1, cache_policy=NO_CACHE)  # type: ignore[untyped-decorator] # as above
def fail_once(name: str) -> None:
    """Record the execution, and fail the first time."""
    note(f"{name}@{time.time():.3f}")
    path = MARKS / f"failed-{name}"
    if not path.exists():
        path.touch()
        raise RuntimeError(name)


if __name__ == "__main__":
    serve(work, wait, fail_once, limit=int(sys.argv[1]))

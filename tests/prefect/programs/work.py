"""A task that records its executions in a folder, and a worker with a limit of concurrent runs: ``work.py 1``."""

import os
import sys
import time
from pathlib import Path

from prefect import task
from prefect.task_worker import serve


@task  # type: ignore[untyped-decorator] # Prefect is not in this environment
def mark(folder: str, name: str, gate: str | None = None) -> None:
    """Wait until the gate file exists, if given; then append the process id to the file ``name``."""
    while gate is not None and not (Path(folder) / gate).exists():
        time.sleep(0.02)
    with (Path(folder) / name).open("a") as file:
        file.write(f"{os.getpid()}\n")


if __name__ == "__main__":
    serve(mark, limit=int(sys.argv[1]))

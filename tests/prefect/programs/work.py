"""Tasks that leave marks in a folder, and a worker that runs as many at once as it is told: ``work.py 1``."""

import os
import sys
import time
from pathlib import Path

from prefect import task
from prefect.task_worker import serve


@task  # type: ignore[untyped-decorator] # Prefect is not in this environment
def mark(folder: str, name: str, gate: str | None = None) -> None:
    """Wait for a file, if there is a gate; then write down who has run this."""
    while gate is not None and not (Path(folder) / gate).exists():
        time.sleep(0.02)
    with (Path(folder) / name).open("a") as file:
        file.write(f"{os.getpid()}\n")


if __name__ == "__main__":
    serve(mark, limit=int(sys.argv[1]))

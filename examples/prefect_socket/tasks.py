"""A Prefect task, and a worker that executes its runs. Usage: ``python tasks.py``."""

import sys
from pathlib import Path

from prefect import task
from prefect.task_worker import serve


@task
def count(name: str, times: int) -> int:
    """Add to the number in a file; a real task would do something useful."""
    file = Path(name)
    total = (int(file.read_text()) if file.exists() else 0) + times
    file.write_text(str(total))
    return total


if __name__ == "__main__":
    serve(count, limit=int(sys.argv[1]) if sys.argv[1:] else 1)

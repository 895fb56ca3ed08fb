"""Look up batches of 1 to 5 runs that do not exist. Print the texts of the queries, each once, as JSON."""

import asyncio
import json
import sys
from uuid import uuid4

import sqlalchemy as sa

from taskqueue_prefect.batching import read_runs

texts: dict[str, None] = {}


def note(_connection: object, _cursor: object, text: str, *_: object) -> None:
    """Remember the text of a query of runs."""
    if "task_run" in text:
        texts[text] = None


async def main() -> None:
    """Look up the batches one after the other."""
    sa.event.listen(sa.engine.Engine, "before_cursor_execute", note)
    for size in range(1, 6):
        assert await read_runs([str(uuid4()) for _ in range(size)]) == [None] * size


asyncio.run(main())
sys.stdout.write(json.dumps([*texts]))

"""Submit runs of `work.mark` with these parameters (JSON), in turn; print the key, and the id of each."""

import asyncio
import json
import sys

from submit import submit
from work import mark


async def main() -> None:
    """Submit them."""
    runs = [await submit(mark, **parameters) for parameters in json.loads(sys.argv[1])]
    sys.stdout.write(json.dumps([mark.task_key, runs]))


asyncio.run(main())

"""Submit runs of `work.mark` with these parameters (JSON), one after the other.

Print the task key and the runs' ids.
"""

import asyncio
import json
import sys

from submit import submit
from work import mark


async def main() -> None:
    """Submit the runs, and print the key and the ids."""
    runs = [await submit(mark, **parameters) for parameters in json.loads(sys.argv[1])]
    sys.stdout.write(json.dumps([mark.task_key, runs]))


asyncio.run(main())

"""Start a server's application and end it; say whose queue it has: ``serve_once.py [odd]``.

``odd``: its code is not the one that is known.
"""

import asyncio
import os
import sys

from prefect.server.api.server import create_app
from prefect.server.task_queue import TaskQueue

if sys.argv[1:] == ["odd"]:
    from taskqueue_prefect import replacing

    replacing.FINGERPRINTS["prefect.server.task_queue"] = "another"


async def main() -> None:
    """Do it."""
    app = create_app()
    async with app.router.lifespan_context(app):
        sys.stdout.write(TaskQueue.__module__)
        sys.stdout.flush()
        if TaskQueue.__module__.startswith("prefect."):
            os._exit(0)  # what Prefect's own services do at their end is not looked at here


asyncio.run(main())

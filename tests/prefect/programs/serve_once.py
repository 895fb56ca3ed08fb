"""Start a server's application and end it; say whose queue it has: ``serve_once.py [odd]``.

``odd``: its code is not the one that is known. First it is to be strict; say what comes of that, too.
"""

import asyncio
import os
import sys

from prefect.server.api.server import create_app
from prefect.server.task_queue import TaskQueue

from taskqueue_prefect import patches
from taskqueue_prefect.lifespan import QueueNotInUse

STRICT = "TASKQUEUE_PREFECT_STRICT"


async def serve() -> None:
    """Start it, and end it."""
    app = create_app()
    async with app.router.lifespan_context(app):
        sys.stdout.write(f"{TaskQueue.__module__}\n")
        sys.stdout.flush()
        if TaskQueue.__module__.startswith("prefect."):
            os._exit(0)  # what Prefect's own services do at their end is not looked at here


async def serve_odd() -> None:
    """Do the same with odd code, strictly and not."""
    patches.FINGERPRINTS["prefect.server.task_queue"] = "another"
    os.environ[STRICT] = "true"
    try:
        await serve()
    except QueueNotInUse as error:
        sys.stdout.write(f"{error}\n")
    os.environ[STRICT] = "false"
    await serve()


asyncio.run(serve_odd() if sys.argv[1:] == ["odd"] else serve())

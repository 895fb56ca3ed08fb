"""Start Prefect's server application, print the module of its task queue, and end it: ``serve_once.py [odd]``.

With ``odd`` Prefect's code seems to differ from the supported version; the first start is strict, and its error is
printed.
"""

import asyncio
import os
import sys

from prefect.server.api.server import create_app
from prefect.server.orchestration import core_policy

from taskqueue_prefect import patches
from taskqueue_prefect.lifespan import QueueNotInUse

STRICT = "TASKQUEUE_PREFECT_STRICT"


async def serve() -> None:
    """Start the application, print the module of its task queue, and end it."""
    app = create_app()
    async with app.router.lifespan_context(app):
        await asyncio.sleep(0)  # a plugin that is installed late has its own task
        module = core_policy.TaskQueue.__module__
        sys.stdout.write(f"{module}\n")
        sys.stdout.flush()
        if module.startswith("prefect."):
            os._exit(0)  # skip the shutdown of Prefect's own services


async def serve_odd() -> None:
    """Pretend that Prefect's code differs from the supported version, and start in strict mode and then normally."""
    for name in patches.FINGERPRINTS:
        patches.FINGERPRINTS[name] = "another"
    os.environ[STRICT] = "true"
    try:
        await serve()
    except QueueNotInUse as error:
        sys.stdout.write(f"{error}\n")
    os.environ[STRICT] = "false"
    await serve()


asyncio.run(serve_odd() if sys.argv[1:] == ["odd"] else serve())

"""The loop that runs the maintenance of the store. Any number of servers and workers may run it."""

from __future__ import annotations

import asyncio
import logging
import random

from taskqueue_core.capabilities import Control
from taskqueue_core.consumer.outage import log_fields
from taskqueue_core.errors import TaskQueueError

_EVERY = 2.0
_JITTER = 0.25
_PASS_SECONDS = 30.0
_log = logging.getLogger("taskqueue.housekeeping")


async def run_maintenance(control: Control) -> None:
    """Run maintenance about every two seconds until cancelled. Log only the first of several failures in a row."""
    failing = False
    unclaimed, results = set[str](), set[str]()
    while True:
        await asyncio.sleep(_EVERY * random.uniform(1 - _JITTER, 1 + _JITTER))  # noqa: S311 - the random factor only spreads the load
        try:
            async with asyncio.timeout(_PASS_SECONDS):
                done = await control.maintain()
        except (TaskQueueError, TimeoutError) as error:
            if not failing:
                _log.warning(
                    "maintenance failed (further failures in a row are not logged)",
                    extra=log_fields(error),
                )
            failing = True
        except Exception:  # noqa: BLE001 - the loop must continue after any error
            if not failing:
                _log.exception("maintenance failed")
            failing = True
        else:
            failing = False
            if done.expired or done.recovered:
                figures = {"expired": len(done.expired), "recovered": done.recovered}
                _log.info("maintenance finished", extra=figures)
            # A queue may have no consumer for one pass, while its worker restarts. Warn only after two passes in a row.
            matches = set(done.unclaimed)
            if news := sorted((matches & unclaimed) - results):
                _log.warning(
                    "queues with waiting tasks have no consumer", extra={"queues": " ".join(news)}
                )
            unclaimed, results = matches, matches & (results | unclaimed)

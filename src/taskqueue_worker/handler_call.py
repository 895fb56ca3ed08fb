"""One call of a handler, and the outcomes of its tasks."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Sequence

import msgspec

from taskqueue_core.application.context import Context
from taskqueue_core.protocol.frames import WireDelivery
from taskqueue_core.retry import Failed, Outcome
from taskqueue_core.tasks import Delivery
from taskqueue_worker.handlers import BatchHandler, Handler
from taskqueue_worker.outcomes import outcome_of_error, outcome_of_value

_OWN_FRAMES = 1
_log = logging.getLogger("taskqueue.worker")


class Fatal(msgspec.Struct, frozen=True):
    """A handler raised an exception that ends the process."""

    error: BaseException


HandlerEnd = Sequence[Outcome] | Fatal
"""one outcome for each task of a call"""


class RunningTask(msgspec.Struct, eq=False):
    """One delivery that is being executed."""

    delivery: Delivery | WireDelivery
    context: Context
    call: HandlerCall
    settled: bool = False


class HandlerCall(msgspec.Struct, eq=False):
    """One call of a handler: for one task, or for several if the handler takes batches."""

    handler: Handler | BatchHandler
    jobs: list[RunningTask] = []
    releasing: bool = False
    task: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None

    def cancel_if_settled(self) -> None:
        """Cancel the coroutine if all its tasks are settled."""
        if self.task is not None and all(job.settled for job in self.jobs):
            self.task.cancel()


def outcomes_of_return(call: HandlerCall, value: object, limit: int) -> Sequence[Outcome]:
    """Return the outcomes of a call that returned."""
    if not isinstance(call.handler, BatchHandler):
        return (outcome_of_value(value, limit),)
    jobs = call.jobs
    if value is None:
        return [outcome_of_value(None, limit)] * len(jobs)
    if not isinstance(value, list | tuple) or len(value) != len(jobs):
        count = len(value) if isinstance(value, list | tuple) else "no list of"
        failed = Failed(f"the batch handler returned {count} results for {len(jobs)} tasks")
        _log.warning("%s: %s", call.handler.key, failed.error)
        return [failed] * len(jobs)
    return [
        outcome_of_error(item) if isinstance(item, Exception) else outcome_of_value(item, limit)
        for item in value
    ]


def outcomes_of_error(call: HandlerCall, error: BaseException) -> HandlerEnd:
    """Return the outcomes of a call that raised: the same for each of its tasks."""
    if not isinstance(error, Exception):
        return Fatal(error)
    outcome = outcome_of_error(error)
    live = [job for job in call.jobs if not job.settled]
    if isinstance(outcome, Failed) and live:
        # The message is not logged: it may quote the payload. The store gets it with the retry.
        first = live[0].delivery
        _log.warning(
            "task %s%s of %s failed (attempt %d): %s\n%s",
            first.task.id,
            f" and {len(live) - 1} more" if len(live) > 1 else "",
            first.task.key,
            first.attempt,
            type(error).__name__,
            "".join(traceback.format_tb(error.__traceback__)[_OWN_FRAMES:]),
        )
    return [outcome] * len(call.jobs)

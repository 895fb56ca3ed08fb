"""Storing the steps that handlers have added to their workflows, before their tasks are acked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from taskqueue_core.application.errors import NotConnected
from taskqueue_core.application.running_workflow import RunningWorkflow
from taskqueue_core.errors import BackendUnavailable, PublishUnconfirmed
from taskqueue_core.queue import Queue
from taskqueue_core.retry import Outcome, Snoozed, Success
from taskqueue_worker.outcomes import HandlerCall, HandlerEnd, outcome_of_error
from taskqueue_worker.task_log import TaskLog

_AGAIN_SECONDS = 1.0
"""seconds after which a task runs again whose added steps could not be stored"""


def end_adding(call: HandlerCall) -> dict[int, RunningWorkflow]:
    """Accept no more steps of a handler, which has ended.

    Return the workflows to which it has added some, by the positions of its tasks.
    """
    call.adds = False
    flows = {}
    for place, job in enumerate(call.jobs):
        flow = job.context.end()
        if flow is not None:
            flows[place] = flow
    return flows


async def store_added(
    call: HandlerCall, end: HandlerEnd, flows: Mapping[int, RunningWorkflow], log: TaskLog
) -> HandlerEnd:
    """Store the added steps of the tasks that succeeded, and return how the call ended.

    If the steps of a task are refused, its attempt has failed. If the server or the store does not answer, the task is
    put off, which counts no attempt.
    """
    return await _store(call, end, flows, log, call.queue())


def store_added_from_thread(
    call: HandlerCall, end: HandlerEnd, flows: Mapping[int, RunningWorkflow], log: TaskLog
) -> HandlerEnd:
    """Do the same for a handler in a thread."""
    queue = call.sync_queue()
    try:
        if queue is None:
            _refuse()
        return queue.run(_store(call, end, flows, log, queue.queue))
    except Exception as error:  # noqa: BLE001 - the call must end
        return [outcome_of_error(error, call.handler.encoding)] * len(call.jobs)


async def _store(
    call: HandlerCall,
    end: HandlerEnd,
    flows: Mapping[int, RunningWorkflow],
    log: TaskLog,
    queue: Queue | None,
) -> HandlerEnd:
    if isinstance(end, BaseException):
        return end
    outcomes: list[Outcome] = [*end]
    for place, flow in flows.items():
        job = call.jobs[place]
        if not isinstance(outcomes[place], Success) or job.settled:
            continue
        try:
            if queue is None:
                _refuse()
            await flow.store(queue)
        except (BackendUnavailable, PublishUnconfirmed) as error:
            outcomes[place] = Snoozed(_AGAIN_SECONDS)
            log.not_stored(job.delivery, error)
        except Exception as error:  # noqa: BLE001 - middleware may raise any exception
            failed = outcome_of_error(error, call.handler.encoding)
            outcomes[place] = failed
            log.failed([job.delivery], error, getattr(failed, "traceback", None))
    return outcomes


def _refuse() -> NoReturn:
    raise NotConnected(
        "the worker has ended, so the steps that the handler has added are not stored"
    )

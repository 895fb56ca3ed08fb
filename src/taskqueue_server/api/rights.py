"""The rights that publishing a task needs beyond that for its own queue."""

from __future__ import annotations

from taskqueue_core.tasks import Task
from taskqueue_server.auth.access import OBSERVING
from taskqueue_server.routing.operations import RequestContext

READING = ("publish", "admin")
"""the rights of which one permits to read the results of a queue's tasks"""
LOOKING_UP = ("publish", *OBSERVING)
"""the rights of which one permits to read the statuses of a queue's tasks"""


def demand_to_publish(call: RequestContext, *tasks: Task) -> None:
    """Raise `ProblemError` unless the client may publish the tasks, and read those that they wait for.

    A member of a batch holds it up, so the client must be permitted to publish to the batch's queue as well.
    """
    for task in tasks:
        call.demand(task.key)
        if task.batch is not None:
            call.demand(task.batch.key, name="the key of the batch")
        if task.after is not None:
            for key in {parent.key for parent in task.after.tasks}:
                call.demand(key, READING, "the key of a task in after.tasks")

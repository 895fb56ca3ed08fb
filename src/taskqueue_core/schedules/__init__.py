"""Schedules without I/O: what is published, the instants at which it is, and which of these are due."""

from taskqueue_core.schedules.plan import CATCH_UP, Plan, Skipped, SkipReason, plan
from taskqueue_core.schedules.schedule import (
    INSTANT_HEADER,
    SCHEDULE_HEADER,
    Instant,
    InstantForm,
    Overlap,
    Schedulable,
    Schedule,
    TaskTemplate,
    check_overlap,
    is_instant,
    next_instant,
    scheduled_task,
)
from taskqueue_core.schedules.spec import Spec
from taskqueue_core.schedules.when import Cron, Every, following, text_of

__all__ = [
    "CATCH_UP",
    "INSTANT_HEADER",
    "SCHEDULE_HEADER",
    "Cron",
    "Every",
    "Instant",
    "InstantForm",
    "Overlap",
    "Plan",
    "Schedulable",
    "Schedule",
    "SkipReason",
    "Skipped",
    "Spec",
    "TaskTemplate",
    "check_overlap",
    "following",
    "is_instant",
    "next_instant",
    "plan",
    "scheduled_task",
    "text_of",
]

"""The steps of the capability ``schedules``, for backends that keep a schedule as one object."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import structs

from taskqueue_core.authoring.helpers import check_size
from taskqueue_core.capabilities.schedules import (
    OVERLAP,
    RECENT,
    RETRY_SECONDS,
    Fire,
    Fired,
    Outcome,
    StoredSchedule,
)
from taskqueue_core.errors import SettingsConflict
from taskqueue_core.limits import LIMITS, check_number
from taskqueue_core.tasks import Confirmation, Published, Refusal, Task


def check_schedule_limit(limit: int) -> None:
    """Check the ``limit`` of a call that returns schedules. Raises `InvalidInput`."""
    check_number("limit", limit, 1, LIMITS.batch)


def check_fires(fires: tuple[Fire, ...]) -> None:
    """Check the number of tasks in a call of `Schedules.fire`. Raises `InvalidInput`."""
    check_size("fires", fires)
    check_size("runs", [run for fire in fires for run in fire.runs])


def check_version(stored: StoredSchedule | None, version: int | None) -> None:
    """Raise `SettingsConflict` if a version was given, and the stored schedule has another one."""
    current = stored.version if stored is not None else 0
    if version is not None and version != current:
        raise SettingsConflict(
            f"the schedule has version {current}, not {version}: read it again, and repeat the change"
        )


def put_step(
    stored: StoredSchedule | None,
    schedule: StoredSchedule,
    *,
    version: int | None,
    keep_next: bool,
    new_version: int,
) -> StoredSchedule:
    """Return the schedule that a put stores, or ``stored`` itself if it is repeated. Raises `SettingsConflict`."""
    current = stored.version if stored is not None else 0
    if stored is not None and version not in (None, current) and stored.spec == schedule.spec:
        return stored
    check_version(stored, version)
    recent = stored.recent if stored is not None else schedule.recent
    changed = structs.replace(schedule, version=new_version, recent=recent, refused=None)
    if stored is None or not keep_next:
        return changed
    return structs.replace(changed, next_at=stored.next_at, refused=stored.refused)


def fire_step(
    stored: StoredSchedule | None, fire: Fire, publish: Callable[[Task], Confirmation], now: float
) -> tuple[Fired, StoredSchedule | None]:
    """Publish the tasks of a plan, and return what was done and the changed schedule; ``None`` if the plan is stale.

    `due_again` returns when the schedule is due again.
    """
    if stored is None or stored.version != fire.version:
        return Fired(stale=True), None
    if fire.planned_for is not None and stored.next_at != fire.planned_for:
        return Fired(stale=True), None
    answers: list[Confirmation] = []
    stopped: Outcome | None = None
    for run in fire.runs:
        answers.append(publish(run.task))
        if result_of(answers[-1]) is None:
            code = answers[-1].code or Published.REFUSED
            stopped = Outcome(instant=run.instant, at=now, task_id=run.task.id, result=code.value)
            break
    next_at, recent, refused = stored.next_at, stored.recent, stored.refused
    if stopped is None or len(answers) > 1:
        recent = (*recent, *_outcomes(fire, answers, now))[-RECENT:]
        if fire.planned_for is not None:
            next_at = fire.next_at if stopped is None else stopped.instant
    if stopped is not None and fire.planned_for is not None:
        refused = stopped
    elif next_at != stored.next_at:
        refused = None
    changed = structs.replace(stored, next_at=next_at, recent=recent, refused=refused)
    return Fired(confirmations=tuple(answers)), changed


def due_again(fire: Fire, after: StoredSchedule, now: float) -> float | None:
    """Return when a schedule is due after a step that was not stale; ``None`` for never."""
    if fire.planned_for is None or after.next_at != fire.planned_for:
        return after.next_at
    return max(now + RETRY_SECONDS, fire.planned_for)


def _outcomes(fire: Fire, answers: list[Confirmation], now: float) -> list[Outcome]:
    """Return what a step records of its instants, oldest first."""
    skipped = [
        Outcome(instant=skip.instant, at=now, result=skip.reason, count=skip.count)
        for skip in fire.skipped
    ]
    tried = [
        Outcome(instant=run.instant, at=now, task_id=run.task.id, result=result)
        for run, answer in zip(fire.runs, answers, strict=False)
        if (result := result_of(answer)) is not None
    ]
    return [*skipped, *tried]


def result_of(confirmation: Confirmation) -> str | None:
    """Return what is recorded of an instant whose task got this confirmation; ``None`` if it is not over."""
    if confirmation.code is Refusal.NOT_UNIQUE:
        return Refusal.NOT_UNIQUE.value
    if confirmation.status is Published.REFUSED:
        return None
    kept = confirmation.status is Published.DUPLICATE and confirmation.existing_id is not None
    return OVERLAP if kept else confirmation.status.value

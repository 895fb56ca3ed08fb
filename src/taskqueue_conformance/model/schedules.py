"""The schedules of the model: what each step does, and which schedules are due."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from msgspec import structs

from taskqueue_conformance.model.entries import Span
from taskqueue_core.capabilities import Due, Fire, Fired, StoredSchedule
from taskqueue_core.capabilities.schedules import (
    OVERLAP,
    RECENT,
    RETRY_SECONDS,
    Outcome,
)
from taskqueue_core.tasks import Confirmation, Published, Refusal, Task

Name = tuple[str, str]
"""the queue and the name of a schedule"""
_ROUNDING = 1e-3
"""seconds by which a store may round a time"""


class Schedules:
    """Every schedule, when it is due, and the versions that were used."""

    def __init__(self) -> None:
        self.stored: dict[Name, StoredSchedule] = {}
        self._due: dict[Name, Span] = {}
        """the least and greatest time at which a schedule is due; it is absent if the schedule does not fire"""
        self._versions: dict[Name, int] = {}

    def put(
        self,
        schedule: StoredSchedule,
        answer: StoredSchedule | None,
        *,
        version: int | None,
        keep_next: bool,
    ) -> None:
        """Record the answer to a put; ``None`` means that it raised `SettingsConflict`."""
        name = schedule.key, schedule.name
        stored = self.stored.get(name)
        right = version is None or version == (stored.version if stored else 0)
        if not right:
            repeated = stored is not None and stored.spec == schedule.spec
            alike = answer is not None and stored is not None and _alike(answer, stored)
            assert alike if repeated else answer is None, (
                f"a put for version {version} of {stored} answered {answer}"
            )
            return
        assert answer is not None, f"a put for version {version} of {stored} was refused"
        used = self._versions.get(name, 0)
        assert answer.version > used, f"version {used} was used before: {answer}"
        expected = structs.replace(schedule, version=answer.version)
        if stored is not None:
            expected = structs.replace(expected, recent=stored.recent)
        if stored is not None and keep_next:
            expected = structs.replace(expected, next_at=stored.next_at, refused=stored.refused)
        assert _alike(answer, expected), f"wrong schedule: expected {expected}, got {answer}"
        self._versions[name] = answer.version
        self.stored[name] = answer
        latest = self._due[name][1] if keep_next and name in self._due else -inf
        self._set_due(name, answer.next_at, latest)

    def deleted(self, name: Name, version: int | None, *, answer: bool | None) -> None:
        """Record the answer to a delete; ``None`` means that it raised `SettingsConflict`."""
        stored = self.stored.get(name)
        if version is not None and version != (stored.version if stored else 0):
            assert answer is None, f"a delete of version {version} of {stored} answered {answer}"
            return
        assert answer is (stored is not None), f"a delete of {stored} answered {answer}"
        self.stored.pop(name, None)
        self._due.pop(name, None)

    def fired(
        self,
        fire: Fire,
        answer: Fired,
        span: Span,
        published: Callable[[Task, Confirmation, Span], None],
    ) -> None:
        """Record what a step has done. ``published`` records the answer to the publish of one task."""
        name = fire.key, fire.name
        stored = self.stored.get(name)
        planned = fire.planned_for
        stale = stored is None or stored.version != fire.version
        stale = stale or (planned is not None and stored is not None and stored.next_at != planned)
        assert answer.stale is stale, f"{fire} of {stored} answered {answer}"
        if stored is None or stale:
            assert not answer.confirmations, f"a stale plan published tasks: {answer}"
            return
        results: list[str | None] = []
        for run, confirmation in zip(fire.runs, answer.confirmations, strict=False):
            published(run.task, confirmation, span)
            results.append(_result_of(confirmation))
        stopped = results[-1:] == [None]
        assert None not in results[:-1], f"a step went on after a refusal: {answer}"
        assert stopped or len(results) == len(fire.runs), f"a step left tasks out: {answer}"
        self.stored[name] = self._after(stored, fire, answer, results, span[0])
        if planned is not None:
            waits = self.stored[name].next_at == planned
            latest = span[1] + RETRY_SECONDS if waits else -inf
            self._set_due(name, self.stored[name].next_at, latest)

    def _after(
        self,
        stored: StoredSchedule,
        fire: Fire,
        answer: Fired,
        results: list[str | None],
        at: float,
    ) -> StoredSchedule:
        """Return the schedule after a step that was not stale. ``results``: one per task, ``None`` for a refusal."""
        stopped = results[-1:] == [None]
        outcomes = [
            Outcome(instant=run.instant, at=at, task_id=run.task.id, result=result)
            for run, result in zip(fire.runs, results, strict=False)
            if result is not None
        ]
        changed = stored
        if outcomes or not stopped:
            changed = structs.replace(stored, recent=(*stored.recent, *outcomes)[-RECENT:])
        if fire.planned_for is None:
            return changed
        if not stopped:
            return structs.replace(changed, next_at=fire.next_at, refused=None)
        last = fire.runs[len(results) - 1]
        code = answer.confirmations[-1].code or Published.REFUSED
        refused = Outcome(instant=last.instant, at=at, task_id=last.task.id, result=code.value)
        following = last.instant if outcomes else stored.next_at
        return structs.replace(changed, next_at=following, refused=refused)

    def listed(self, listed: Sequence[StoredSchedule]) -> None:
        """Compare all schedules of the store with the model."""
        expected = sorted(self.stored.values(), key=lambda one: (one.name, one.key))
        found = sorted(listed, key=lambda one: (one.name, one.key))
        alike = len(found) == len(expected) and all(map(_alike, found, expected))
        assert alike, f"wrong schedules: expected {expected}, got {found}"

    def due(self, due: Due, span: Span) -> None:
        """Compare the schedules that are due with the model."""
        names = [(one.key, one.name) for one in due.schedules]
        assert len(set(names)) == len(names), f"a schedule is due twice: {names}"
        for name, (least, greatest) in self._due.items():
            assert name in names or greatest > span[0], f"{name} is not due (law 8)"
            assert name not in names or least <= span[1] + _ROUNDING, f"{name} is due early (law 8)"
        assert set(names) <= set(self._due), f"schedules are due that do not fire: {names}"
        for one in due.schedules:
            expected = structs.replace(self.stored[one.key, one.name], recent=one.recent)
            assert _alike(one, expected), f"wrong schedule: expected {expected}, got {one}"
        later = [at for name, at in self._due.items() if name not in names]
        least = min((one[0] for one in later), default=inf) - _ROUNDING
        greatest = min((one[1] for one in later), default=inf) + _ROUNDING
        next_at = inf if due.next_at is None else due.next_at
        assert least <= next_at <= greatest, (
            f"wrong time of the next schedule: expected {least} to {greatest}, got {next_at}"
        )

    def _set_due(self, name: Name, at: float | None, latest: float) -> None:
        if at is None:
            self._due.pop(name, None)
        else:
            self._due[name] = at, max(at, latest)


def _result_of(answer: Confirmation) -> str | None:
    """Return what is recorded of the instant of a task; ``None`` if it is not over."""
    if answer.code is Refusal.NOT_UNIQUE:
        return Refusal.NOT_UNIQUE.value
    if answer.status is Published.REFUSED:
        return None
    kept = answer.status is Published.DUPLICATE and answer.existing_id is not None
    return OVERLAP if kept else answer.status.value


def _alike(one: StoredSchedule, other: StoredSchedule) -> bool:
    """Return whether two schedules are equal, apart from the times at which they were fired."""
    return _untimed(one) == _untimed(other)


def _untimed(stored: StoredSchedule) -> StoredSchedule:
    recent = tuple(structs.replace(each, at=0.0) for each in stored.recent)
    refused = stored.refused and structs.replace(stored.refused, at=0.0)
    return structs.replace(stored, recent=recent, refused=refused)

"""The rules of the queue state machine about schedules."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from taskqueue_conformance.model.draws import batches, keys, schedules, tasks, versions
from taskqueue_conformance.model.moves import Moves
from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import Fire, Run, StoredSchedule, schedules_of
from taskqueue_core.errors import SettingsConflict


class ScheduleRules(Moves):
    """Those who put, fire and delete schedules."""

    @precondition(lambda self: self.has(Capability.SCHEDULES))
    @rule(
        key=keys,
        name=schedules,
        units=st.sampled_from([None, 0, 1, 2]),
        spec=st.sampled_from([b"1", b"2"]),
        version=versions,
        keep_next=st.booleans(),
    )
    def put(
        self,
        *,
        key: str,
        name: str,
        units: int | None,
        spec: bytes,
        version: int | None,
        keep_next: bool,
    ) -> None:
        """Put a new schedule, change one, or pause it."""
        schedule = StoredSchedule(key=key, name=name, spec=spec, next_at=self.at(units))
        number = self._version(key, name, version)
        call = schedules_of(self.bench.backend).put(schedule, version=number, keep_next=keep_next)
        answer: StoredSchedule | None = None
        try:
            answer = self.run(call)
        except SettingsConflict:
            assert number is not None, "a put for no version was refused"
        self.schedules.put(schedule, answer, version=number, keep_next=keep_next)
        self._compare()
        self.done("conflict" if answer is None else f"version {answer.version}")

    @precondition(lambda self: self.has(Capability.SCHEDULES))
    @rule(key=keys, name=schedules, version=versions)
    def remove(self, key: str, name: str, version: int | None) -> None:
        """Delete a schedule. It may be unknown."""
        number = self._version(key, name, version)
        answer: bool | None = None
        try:
            answer = self.run(schedules_of(self.bench.backend).delete(key, name, version=number))
        except SettingsConflict:
            assert number is not None, "a delete of no version was refused"
        self.schedules.deleted((key, name), number, answer=answer)
        self._compare()
        self.done(f"{answer}")

    @precondition(lambda self: self.has(Capability.SCHEDULES))
    @rule(
        key=keys,
        name=schedules,
        chosen=batches,
        fields=tasks,
        units=st.sampled_from([None, 1, 2]),
        planned=st.sampled_from(["now", "now", "now", "late", "old", "by hand"]),
    )
    def fire(
        self,
        *,
        key: str,
        name: str,
        chosen: list[str],
        fields: dict[str, Any],
        units: int | None,
        planned: str,
    ) -> None:
        """Fire a schedule, which may be unknown, by a plan that may be stale."""
        self._compare()
        stored = self.schedules.stored.get((key, name))
        at = self.bench.now if stored is None or stored.next_at is None else stored.next_at
        version = 1 if stored is None else stored.version
        fire = Fire(
            key=key,
            name=name,
            version=version - (planned == "old"),
            planned_for=None if planned == "by hand" else at + (planned == "late"),
            runs=tuple(
                Run(at + number, self.made(key, task_id, fields))
                for number, task_id in enumerate(chosen)
            ),
            next_at=self.at(units),
        )
        (answer,), span = self.timed(schedules_of(self.bench.backend).fire(fire))
        self.schedules.fired(fire, answer, span, self.model.published)
        self._compare()
        self.done("stale" if answer.stale else ", ".join(a.status for a in answer.confirmations))

    def _version(self, key: str, name: str, chosen: int | None) -> int | None:
        stored = self.schedules.stored.get((key, name))
        current = 0 if stored is None else stored.version
        return None if chosen is None else current + chosen

    def _compare(self) -> None:
        """Compare the schedules of the store, and those that are due, with the model."""
        stored = schedules_of(self.bench.backend)
        self.schedules.listed(self.run(stored.list(limit=100)))
        due, span = self.timed(stored.due(100))
        self.schedules.due(due, span)

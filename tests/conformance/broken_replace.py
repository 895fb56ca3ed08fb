# ruff: noqa: D102 - each method replaces a documented method of the correct backend
"""Backends that each break one promise about tasks that replace others, or about debounces."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from taskqueue_core.tasks import Confirmation, Published, State, Task
from tests.conformance.broken_limits import queue_of
from tests.conformance.broken_unique import Changes, First, kept, sharing
from tests.conformance.facade import FacadePublisher


class StoresBoth(Changes):
    """Defect: a task that should replace another one is stored as well."""

    def key(self, unique: Any) -> Any:
        return None if unique.on_conflict == "replace" else unique


class ReplacesOnlyThePayload(Changes):
    """Defect: a replaced task keeps the other fields."""

    def other(self, task: Task) -> Task:
        live = [r for r in sharing(self, task) if r.replaceable]
        if not live or task.unique is None or task.unique.on_conflict != "replace":
            return task
        before = live[0].task
        kept = {"headers": before.headers, "priority": before.priority}
        return structs.replace(task, max_attempts=before.max_attempts, **kept)


class KeepsOutWhileRunning(First):
    """Defect: a task that should be stored next to a running one is kept out."""

    def decide(self, task: Task) -> Confirmation | None:
        live = [r for r in sharing(self, task) if r.live]
        replacing = task.unique and task.unique.on_conflict == "replace"
        return kept(task, live[0]) if replacing and live and not live[0].replaceable else None


class _Follows(FacadePublisher):
    """A publisher that does something to a task that was replaced."""

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        answers: list[Confirmation] = []
        for task in tasks:
            before = dict(queue_of(self.facade, task.key).records)
            (answer,) = await self.inner.publish(task)
            if answer.status is Published.REPLACED and task.id not in before and answer.existing_id:
                queue = queue_of(self.facade, task.key)
                self.spoil(queue, queue.records[answer.existing_id], task)
            answers.append(answer)
        return tuple(answers)

    def spoil(self, queue: Any, record: Any, task: Task) -> None:
        """Change what is wrong."""


class LosesItsPlace(_Follows):
    """Defect: a waiting task that is replaced goes to the end."""

    def spoil(self, queue: Any, record: Any, task: Task) -> None:  # noqa: ARG002 - not needed
        if record.state is State.WAITING:
            store = self.facade.inner._store
            store._take_out(record)
            store._make_available(record, "replaced")


class ForgetsTheRepetition(_Follows):
    """Defect: the id of a publish that replaced is not remembered."""

    def spoil(self, queue: Any, record: Any, task: Task) -> None:  # noqa: ARG002 - not needed
        del queue.records[task.id]


class CountsReplacements(_Follows):
    """Defect: a replacement counts as published."""

    def spoil(self, queue: Any, record: Any, task: Task) -> None:  # noqa: ARG002 - not needed
        queue.published += 1


class TakesRoom(_Follows):
    """Defect: a replacement frees room."""

    def spoil(self, queue: Any, record: Any, task: Task) -> None:  # noqa: ARG002 - not needed
        queue.fresh -= 1


class KeepsTheDeadline(_Follows):
    """Defect: a replaced task has no deadline."""

    def spoil(self, queue: Any, record: Any, task: Task) -> None:  # noqa: ARG002 - not needed
        record.task = structs.replace(record.task, deadline=None)


class ForgetsItsOwnPayload(_Follows):
    """Defect: the publish of a task that was replaced later, repeated, is a conflict."""

    def spoil(self, queue: Any, record: Any, task: Task) -> None:  # noqa: ARG002 - not needed
        record.digest = None


class NeverMoves(Changes):
    """Defect: the time of a debounced task stays that of the first publish."""

    def other(self, task: Task) -> Task:
        live = [r for r in sharing(self, task) if r.replaceable]
        if not live or task.unique is None or task.unique.debounce is None:
            return task
        return structs.replace(
            task, not_before=live[0].at, unique=structs.replace(task.unique, debounce=None)
        )


class _Debounces(Changes):
    def key(self, unique: Any) -> Any:
        if unique.debounce is None:
            return unique
        return structs.replace(unique, debounce=self.debounce(unique.debounce))

    def debounce(self, debounce: Any) -> Any:
        """Return the debounce that is used instead."""
        return debounce


class WaitsForEver(_Debounces):
    """Defect: a debounce has no longest wait."""

    def debounce(self, debounce: Any) -> Any:
        return structs.replace(debounce, max_wait=None)


class WaitsAtMostOnce(_Debounces):
    """Defect: a debounced task comes at its longest wait, and not earlier."""

    def debounce(self, debounce: Any) -> Any:
        return (
            debounce
            if debounce.max_wait is None
            else structs.replace(debounce, seconds=debounce.max_wait)
        )


class DeliversTheFirst(Changes):
    """Defect: a debounced task has the contents of the first publish."""

    def other(self, task: Task) -> Task:
        live = [r for r in sharing(self, task) if r.replaceable]
        if not live or task.unique is None or task.unique.debounce is None:
            return task
        return structs.replace(task, payload=live[0].task.payload)


CASES: tuple[tuple[type, str, str | None], ...] = (
    (StoresBoth, "test_replace_contents", None),
    (ReplacesOnlyThePayload, "test_replace_contents", None),
    (CountsReplacements, "test_replace_contents", None),
    (KeepsOutWhileRunning, "test_replace_running_task_is_left_alone", None),
    (LosesItsPlace, "test_replace_keeps_its_place", "4"),
    (ForgetsTheRepetition, "test_replace_repetition", "7"),
    (ForgetsItsOwnPayload, "test_replace_repetition", "7"),
    (TakesRoom, "test_replace_room", "6"),
    (KeepsTheDeadline, "test_replace_deadline", None),
    (NeverMoves, "test_debounce", "8"),
    (DeliversTheFirst, "test_debounce", "8"),
    (WaitsForEver, "test_debounce_has_a_longest_wait", "8"),
    (WaitsAtMostOnce, "test_debounce_has_a_longest_wait", "8"),
)
"""each defect, the test of the kit that must fail, and a law that its docstring names"""

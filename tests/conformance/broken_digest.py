# ruff: noqa: D102 - each method replaces a documented method of the correct backend
"""Backends that each break one promise about the digests of contents."""

from __future__ import annotations

from msgspec import structs

from taskqueue_core.tasks import Confirmation, Published, State, Task
from tests.conformance.broken_limits import queue_of
from tests.conformance.broken_unique import Answers
from tests.conformance.facade import FacadePublisher


class _Changes(FacadePublisher):
    """A publisher that publishes other tasks than it was given."""

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        return await self.inner.publish(*map(self.other, tasks))

    def other(self, task: Task) -> Task:
        """Return the task that is published instead."""
        return task


class IgnoresDigests(_Changes):
    """Defect: tasks are compared by the bytes of their payloads, although they have digests."""

    def other(self, task: Task) -> Task:
        return structs.replace(task, content_digest=None)


class ComparesOnlyTheStart(_Changes):
    """Defect: only the first bytes of a digest count."""

    def other(self, task: Task) -> Task:
        if task.content_digest is None:
            return task
        return structs.replace(task, content_digest=b"\0" * 16)


class TakesAMissingDigestForEqual(_Changes):
    """Defect: a task without a digest counts as a repetition of one with a digest, if the payloads are equal."""

    def other(self, task: Task) -> Task:
        known = queue_of(self.facade, task.key).records.get(task.id)
        if known is None or task.content_digest is not None:
            return task
        return structs.replace(task, content_digest=known.task.content_digest)


class _Forgets(_Changes):
    """Forgets the digests of some tasks before a publish."""

    def other(self, task: Task) -> Task:
        known = queue_of(self.facade, task.key).records.get(task.id)
        if known is not None and self.forgets(known.state):
            known.digest = None
            known.task = structs.replace(known.task, content_digest=None)
        return task

    def forgets(self, state: State | None) -> bool:  # noqa: ARG002 - subclasses use it
        """Return whether the digests of tasks in this state are forgotten: by default, in each state."""
        return True


class ForgetsAtTheEnd(_Forgets):
    """Defect: the digest is forgotten when the task has ended."""

    def forgets(self, state: State | None) -> bool:
        return state is State.DONE


class ForgetsOfTheDead(_Forgets):
    """Defect: the digest of a dead letter is forgotten."""

    def forgets(self, state: State | None) -> bool:
        return state is State.DEAD


class CopiesHaveNone(_Forgets):
    """Defect: the copies of a fan-out have no digests."""

    def other(self, task: Task) -> Task:
        for key in queue_of(self.facade, task.key).settings.bound_to:
            super().other(structs.replace(task, key=key))
        return task


class TakesConflictsForRepetitions(Answers):
    """Defect: a conflict is reported as a duplicate."""

    def answer(self, answer: Confirmation) -> Confirmation:
        if answer.status is not Published.CONFLICT:
            return answer
        return structs.replace(answer, status=Published.DUPLICATE)


CASES: tuple[tuple[type, str, str | None], ...] = (
    (IgnoresDigests, "test_digest_of_the_same_content", "7"),
    (ComparesOnlyTheStart, "test_digest_of_another_content", "7"),
    (TakesAMissingDigestForEqual, "test_digest_of_another_content", "7"),
    (TakesConflictsForRepetitions, "test_digest_of_another_content", "7"),
    (ForgetsAtTheEnd, "test_digest_known_in_every_state", "7"),
    (ForgetsOfTheDead, "test_digest_known_when_dead", "7"),
    (CopiesHaveNone, "test_digest_of_copies", "7"),
    (IgnoresDigests, "test_digest_of_a_replaced_task", "7"),
)
"""each defect, the test of the kit that must fail, and a law that its docstring names"""

"""The rules of the queue state machine about batches. Their members are published by the other rules."""

from __future__ import annotations

from hypothesis.stateful import precondition, rule

from taskqueue_conformance.bench import KEY
from taskqueue_conformance.model.draws import batch_names
from taskqueue_conformance.model.moves import Moves
from taskqueue_core.after import TaskRef
from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import dependencies_of


class BatchRules(Moves):
    """Those who begin and close batches."""

    @precondition(lambda self: self.has(Capability.AFTER))
    @rule(name=batch_names)
    def begin_batch(self, name: str) -> None:
        """Publish a batch, perhaps again."""
        batch = TaskRef(KEY, name)
        task = self.bench.task(name, key=KEY, payload=1, batch=batch)
        (answer,), span = self.timed(self.bench.backend.publisher.publish(task))
        self.model.published(task, answer, span)
        self.done(answer.status)

    @precondition(lambda self: self.has(Capability.AFTER))
    @rule(name=batch_names)
    def close_batch(self, name: str) -> None:
        """Close a batch. It may be closed already, have ended or be unknown."""
        batch = TaskRef(KEY, name)
        answer = self.run(dependencies_of(self.bench.backend).close(batch))
        self.model.batch_closed(batch, answer=answer)
        self.done("closed" if answer else "not blocked")

"""What the model learns of its entries other than by the answers to calls of clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from taskqueue_conformance.model.entries import Entry, Span
from taskqueue_conformance.model.unique_keys import UniqueKeys
from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.tasks import Expired, Ledger, State, TaskStatus


class Upkeep(UniqueKeys):
    """All entries of the model, with what settings, time and maintenance change, and comparisons with the store."""

    def __init__(self, settings: QueueSettings | None) -> None:
        """Create a model without entries. ``settings`` apply to all queues; ``None`` if the settings are unknown."""
        super().__init__()
        self._settings = settings
        window = None if settings is None else settings.dedupe_window
        self.window = (0.0, float("inf")) if window is None else (window, window)

    def expired(self, reports: Iterable[Expired], span: Span) -> None:
        """Record the entries that were reported as expired."""
        for report in reports:
            entry = self.entries.get((report.key, report.task_id))
            assert entry is not None, f"{report} was never published"
            assert entry.owed or entry.maybe_late(span), (
                f"{entry.name} is {entry.state}, but was reported as expired"
            )
            if not entry.owed:
                entry.loose = entry.maybe_hung(span)
                self.end(entry, State.EXPIRED, span)
            entry.owed = False

    def configured(self, key: str, settings: QueueSettings, span: Span) -> None:
        """Record new settings of a queue."""
        limits = self.limits[key]
        if limits.settings.order is not settings.order:
            for entry in self.entries.values():
                entry.uncounted |= entry.task.key == key and entry.state is not State.WAITING
        limits.configured(settings, span)
        self.turns[key].reset()

    def maintained(self, span: Span) -> None:
        """Record that maintenance was run to completion, and ended every delivery that exceeded its processing time."""
        for entry in self.entries.values():
            if entry.surely_hung(span):
                self.lose(entry, span)

    def read(self, key: str, matches: dict[str, TaskStatus | None], span: Span) -> None:
        """Record which deliveries the store has ended because they exceeded their processing time, and which waits."""
        for task_id, status in matches.items():
            entry = self.entries[key, task_id]
            swept, entry.swept = entry.swept, False
            if swept and status is not None and status.state is State.CANCELLED:
                entry.settled.append(("", ""))
                entry.loose = True
                self.end(entry, State.CANCELLED, span)
            ended = status is not None and status.state in (State.WAITING, State.DEAD)
            if ended and entry.maybe_hung(span):
                self.lose(entry, span)
        self.either(key, matches, span)

    def purged(self, key: str, number: int, span: Span) -> None:
        """Record that a purge has ended all entries of a queue that are not in flight.

        A delivery that has exceeded its processing time may count as lost, and so as waiting.
        """
        idle = (State.BLOCKED, State.WAITING, State.SCHEDULED)
        entries = [
            entry
            for state in idle
            for entry in self.entries.values()
            if entry.task.key == key and entry.state is state
        ]
        late = sum(entry.maybe_late(span) for entry in entries)
        hung = [e for e in self.entries.values() if e.task.key == key and e.maybe_hung(span)]
        for entry in hung:
            entry.swept = True
        assert len(entries) - late <= number <= len(entries) + len(hung), (
            f"a purge ended {number} tasks, expected {len(entries)} (law 10)"
        )
        for entry in entries:
            if entry.state in idle:
                self.end(entry, State.CANCELLED, span)

    def check(
        self, key: str, ledger: Ledger, matches: dict[str, TaskStatus | None], span: Span
    ) -> None:
        """Compare a queue's ledger and its tasks' statuses with the model. The ledger was read before the statuses."""
        counts: Counter[str] = Counter(
            {state.value: n for state, n in self._past.get(key, Counter()).items()}
        )
        for (queue, task_id), entry in self.entries.items():
            if queue == key:
                status = matches[task_id]
                if status is None:
                    assert entry.maybe_forgotten(span, self.window), (
                        f"{entry.name} was forgotten too early (law 1)"
                    )
                else:
                    entry.check(status, span)
                counts[(status.state if status else entry.state).value] += 1
        counts["published"] = counts.total()
        assert ledger == Ledger(**counts), (
            f"wrong ledger: expected {dict(counts)}, got {ledger} (law 1)"
        )

    def surely_known(self, entry: Entry, span: Span) -> bool:
        """Return whether every correct store still knows the task."""
        return not entry.maybe_forgotten(span, self.window)

    def release(self, entry: Entry, verb: str) -> None:
        """Record that a delivery was released, by a settlement or otherwise."""
        self.end_receipt(entry, verb)
        entry.state, entry.returned, entry.uncounted = State.WAITING, True, False

    def lose(self, entry: Entry, span: Span) -> None:
        """Record that a delivery exceeded its processing time, and was ended and counted as lost."""
        entry.losses += 1
        entry.settled.append(("", ""))
        if self._settings is not None and entry.losses > self._settings.max_losses:
            self.end(entry, State.DEAD, span)
        else:
            self.end_receipt(entry, None)
            self.release(entry, "")

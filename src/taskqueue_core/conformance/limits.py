"""The limits of one queue of the model: what they forbid, and what they do not."""

from __future__ import annotations

import math

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.conformance.entries import Span
from taskqueue_core.flow import Bucket, bucket_after
from taskqueue_core.tasks import Confirmation, Published, Refusal

__all__ = ["Limits"]

_SLACK = 1e-3
"""of a token or a second: what a store may round"""


class Limits:
    """Settings in force, and the least and the most tokens that there may be."""

    def __init__(self) -> None:
        """Start without limits."""
        self.settings = QueueSettings()
        self._buckets: tuple[Bucket | None, Bucket | None] = (None, None)

    def configured(self, settings: QueueSettings, span: Span) -> None:
        """Other settings came into force at some moment of ``span``."""
        limits = self.settings.rate_limit, settings.rate_limit
        least, most = self._buckets
        self._buckets = (
            bucket_after(least, *limits, span[0]),
            bucket_after(most, *limits, span[1]),
        )
        self.settings = settings

    # publish

    def answers(self, waiting: Span) -> set[Published]:
        """Return what a new task may be answered where so many, at least and at most, were never handed out."""
        capacity = math.inf if self.settings.capacity is None else self.settings.capacity
        allowed = set()
        if not self.settings.intake_paused and waiting[0] < capacity:
            allowed.add(Published.ACCEPTED)
        if self.settings.intake_paused or waiting[1] >= capacity:
            allowed.add(Published.REFUSED)
        return allowed

    def check_refusal(self, answer: Confirmation, waiting: Span) -> None:
        """A new task was refused, as one may be."""
        paused = self.settings.intake_paused
        assert answer.code is (Refusal.INTAKE_PAUSED if paused else Refusal.QUEUE_FULL), (
            f"refused as {answer.code}, intake paused: {paused} (law 6)"
        )
        assert answer.reason, "refused without a reason (law 6)"
        assert answer.retry_after, "refused without a word on when to try again (law 6)"
        if not paused:
            assert answer.depth is not None
            assert waiting[0] <= answer.depth <= waiting[1], (
                f"{answer.depth} tasks count, it must be {waiting[0]} to {waiting[1]} (law 6)"
            )

    # deliver

    def handed_out(self, name: str, at: float, in_flight: int) -> None:
        """A task was handed out at that time, while so many were surely in flight."""
        assert not self.settings.paused, f"{name} was handed out of a paused queue (law 5)"
        bound = self.settings.max_inflight
        assert not bound or in_flight < bound, (
            f"{name} was handed out as number {in_flight + 1}, {bound} may be in flight (law 5)"
        )
        if (limit := self.settings.rate_limit) is not None:
            least, most = self._buckets
            for bucket in (least, most):
                assert bucket is not None
                bucket.fill(limit, at)
                bucket.tokens -= 1
            assert most is not None
            assert most.tokens > -_SLACK, f"{name} was handed out without a token (law 5)"
            assert least is not None
            least.tokens = max(0.0, least.tokens)

    def may_want_place(self, in_flight: int) -> bool:
        """Whether nothing need be handed out for now, however many tokens there are."""
        bound = self.settings.max_inflight
        return self.settings.paused or (bound > 0 and in_flight >= bound)

    def opens_at(self, now: float) -> float | None:
        """Return when there is a token for sure; ``None``: there is one since ``now`` at the latest."""
        limit, (least, _) = self.settings.rate_limit, self._buckets
        if limit is None or least is None:
            return None
        least.fill(limit, now)
        return None if least.tokens >= 1 + _SLACK else least.next_at(limit) + _SLACK

"""The limits of one queue of the model, and the answers and deliveries that they allow."""

from __future__ import annotations

import math

from taskqueue_conformance.model.entries import Span
from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.rate_limit import Bucket, RateLimit, bucket_after
from taskqueue_core.tasks import Confirmation, Published, Refusal

_SLACK = 1e-3
"""maximum rounding error that a store may make, in tokens or seconds"""


class _Tokens:
    """A lower and an upper bound for the number of tokens in the bucket of a rate limit."""

    def __init__(self) -> None:
        self.limit: RateLimit | None = None
        self._least: Bucket | None = None
        self._most: Bucket | None = None

    def configured(self, limit: RateLimit | None, span: Span) -> None:
        self._least = bucket_after(self._least, self.limit, limit, span[0])
        self._most = bucket_after(self._most, self.limit, limit, span[1])
        self.limit = limit

    def take(self, name: str, at: float) -> None:
        if self.limit is None or self._least is None or self._most is None:
            return
        for bucket in (self._least, self._most):
            bucket.fill(self.limit, at)
            bucket.tokens -= 1
        assert self._most.tokens > -_SLACK, f"{name} was delivered without a token (law 5)"
        self._least.tokens = max(0.0, self._least.tokens)

    def opens_at(self, now: float) -> float | None:
        if self.limit is None or self._least is None:
            return None
        self._least.fill(self.limit, now)
        if self._least.tokens >= 1 + _SLACK:
            return None
        return self._least.next_at(self.limit) + _SLACK


class Limits:
    """The current settings of a queue, and the tokens of the queue and of each of its tenants."""

    def __init__(self) -> None:
        self.settings = QueueSettings()
        self._tokens = _Tokens()
        self._of_tenants: dict[str | None, _Tokens] = {}

    def configured(self, settings: QueueSettings, span: Span) -> None:
        """Record new settings, which took effect at some moment within ``span``."""
        self._tokens.configured(settings.rate_limit, span)
        if settings.tenant_rate_limit is None:
            self._of_tenants = {}
        for tokens in self._of_tenants.values():
            tokens.configured(settings.tenant_rate_limit, span)
        self.settings = settings

    def answers(self, waiting: Span, of_tenant: Span) -> set[Published]:
        """Return the answers that a new task may get.

        ``waiting``: least and greatest possible number of tasks that use the queue's capacity. ``of_tenant``: the same
        numbers, counted only for the tenant of the new task.
        """
        allowed = set()
        if not (self._full(waiting[0], of_tenant[0])):
            allowed.add(Published.ACCEPTED)
        if self._full(waiting[1], of_tenant[1]):
            allowed.add(Published.REFUSED)
        return allowed

    def check_refusal(self, answer: Confirmation, waiting: Span, of_tenant: Span) -> None:
        """Fail if a refusal has a wrong code or depth, or lacks a reason or a delay."""
        settings, allowed = self.settings, set()
        if settings.intake_paused:
            allowed.add(Refusal.INTAKE_PAUSED)
        else:
            if waiting[1] >= (settings.capacity or math.inf):
                allowed.add(Refusal.QUEUE_FULL)
            if waiting[0] < (settings.capacity or math.inf):
                allowed.add(Refusal.TENANT_FULL)
        assert answer.code in allowed, f"refused as {answer.code}, allowed: {allowed} (law 6)"
        assert answer.reason, "refused without a reason (law 6)"
        assert answer.retry_after, "refused without retry_after (law 6)"
        if answer.code is not Refusal.INTAKE_PAUSED:
            least, most = of_tenant if answer.code is Refusal.TENANT_FULL else waiting
            assert answer.depth is not None
            assert least <= answer.depth <= most, (
                f"wrong depth: expected {least} to {most}, got {answer.depth} (law 6)"
            )

    def _full(self, waiting: float, of_tenant: float) -> bool:
        settings = self.settings
        return (
            settings.intake_paused
            or waiting >= (settings.capacity or math.inf)
            or of_tenant >= (settings.tenant_capacity or math.inf)
        )

    def handed_out(
        self, name: str, tenant: str | None, at: float, in_flight: int, of_tenant: int
    ) -> None:
        """Record a delivery, and fail if a limit forbids it.

        At least ``in_flight`` other tasks of the queue were in flight, and at least ``of_tenant`` other tasks of the
        tenant.
        """
        settings = self.settings
        assert not settings.paused, f"{name} was delivered from a paused queue (law 5)"
        assert tenant not in settings.paused_tenants, (
            f"{name} was delivered, but its tenant is paused (law 5)"
        )
        for bound, running, whose in (
            (settings.max_inflight, in_flight, "of the queue"),
            (settings.tenant_max_inflight, of_tenant, f"of the tenant {tenant!r}"),
        ):
            assert not bound or running < bound, (
                f"with {name}, too many tasks {whose} are in flight: "
                f"expected at most {bound}, got {running + 1} (law 5)"
            )
        self._tokens.take(name, at)
        self._of_tenant(tenant).take(name, at)

    def may_want_place(self, in_flight: int, tenant: str | None, of_tenant: int) -> bool:
        """Return whether a pause or an in-flight limit may block the delivery of the next task of ``tenant``.

        ``in_flight`` tasks of the queue are in flight; ``of_tenant`` of these tasks belong to the tenant.
        """
        bound = self.settings.max_inflight
        full = bound is not None and in_flight >= bound
        return self.settings.paused or full or self.may_want_own_place(tenant, of_tenant)

    def may_want_own_place(self, tenant: str | None, of_tenant: int) -> bool:
        """Return whether its pause or limit blocks a tenant that has ``of_tenant`` tasks in flight."""
        if tenant in self.settings.paused_tenants:
            return True
        bound = self.settings.tenant_max_inflight
        return bound is not None and of_tenant >= bound

    def opens_at(self, now: float, tenant: str | None) -> float | None:
        """Return when both the queue and the tenant will certainly have a token; ``None`` means now."""
        times = [self._tokens.opens_at(now), self._of_tenant(tenant).opens_at(now)]
        return max((time for time in times if time is not None), default=None)

    def own_opens_at(self, now: float, tenant: str | None) -> float | None:
        """Return when the tenant will certainly have a token; ``None`` means now."""
        return self._of_tenant(tenant).opens_at(now)

    def _of_tenant(self, tenant: str | None) -> _Tokens:
        """Return the tokens of a tenant, which has a full bucket before its first delivery."""
        if tenant not in self._of_tenants:
            tokens = _Tokens()
            tokens.configured(self.settings.tenant_rate_limit, (0.0, 0.0))
            if self.settings.tenant_rate_limit is None:
                return tokens
            self._of_tenants[tenant] = tokens
        return self._of_tenants[tenant]

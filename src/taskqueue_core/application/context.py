"""What a handler can learn about its delivery, and say while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from types import MappingProxyType

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import kind_of
from taskqueue_core.protocol.client_outcomes import clean_text
from taskqueue_core.protocol.frames import WireDelivery
from taskqueue_core.tasks import Delivery


class Context:
    """One delivery, from the handler's side. Safe for use from any thread."""

    __slots__ = ("_delivery", "_report", "_revoked")

    def __init__(
        self, delivery: Delivery | WireDelivery, report: Callable[[str, float | str], None]
    ) -> None:
        """``report`` sends progress; it must neither block nor raise."""
        self._delivery = delivery
        self._report = report
        self._revoked = False

    @property
    def task_id(self) -> str:
        """The task's id: the key to idempotence, since a task may be delivered more than once."""
        return self._delivery.task.id

    @property
    def key(self) -> str:
        """The task's key."""
        return self._delivery.task.key

    @property
    def attempt(self) -> int:
        """From 1; grows with each retry, never with a redelivery."""
        return self._delivery.attempt

    @property
    def losses(self) -> int:
        """How often this attempt was lost with its worker."""
        return self._delivery.losses

    @property
    def shard(self) -> int | None:
        """The shard of its queue that the task is from; none where the queue has but one."""
        return self._delivery.shard

    @property
    def shard_changed(self) -> bool:
        """Whether the task before, on this connection, was from another shard: what was loaded for it may not do."""
        return self._delivery.shard_changed

    @property
    def headers(self) -> Mapping[str, str]:
        """The task's headers, read-only."""
        return MappingProxyType(self._delivery.task.headers)

    @property
    def deadline(self) -> float | None:
        """The task's deadline, Unix seconds."""
        return self._delivery.task.deadline

    @property
    def revoked(self) -> bool:
        """Whether the delivery is no longer this handler's: cancelled, lost, timed out or released.

        Its result will be discarded. An async handler is cancelled as well; a synchronous one should look here now and
        then.
        """
        return self._revoked

    def progress(self, value: float | str) -> None:
        """Say how far the task is: a number from 0 to 1, or text, cut to the limit. Raises `InvalidInput`.

        Never blocks, so it is not awaited. Of several in quick succession the last one is sent.
        """
        if isinstance(value, str):
            self._report(self._delivery.receipt, clean_text(value))
            return
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidInput("progress", kind_of(value), "a number from 0 to 1, or text")
        if not isfinite(value) or not 0 <= value <= 1:
            raise InvalidInput("progress", "a number out of range", "a number from 0 to 1, or text")
        self._report(self._delivery.receipt, float(value))

    def revoke(self) -> None:
        """Set the flag. The worker's business, not a handler's."""
        self._revoked = True

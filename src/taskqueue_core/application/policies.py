"""The policies that tasks declare, and the settings of queues that follow from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from pydantic import Field, ValidationError, field_validator

from taskqueue_core.capabilities import Order, QueueSettings
from taskqueue_core.errors import ConfigurationError
from taskqueue_core.policy_model import PolicyModel, describe
from taskqueue_core.rate_limit import Number, RateLimit, Whole
from taskqueue_core.retry import RetryPolicy

DECLARED_RETRY = RetryPolicy(max_attempts=10, base=2, cap=600)
"""the retry policy of a declared task; a policy that the task declares replaces the fields that it names"""


class QueueLimits(PolicyModel):
    """The limits of a task's queue, for all workers together: docs/flow.md says what each of them promises.

    A field that is not given is not declared: the queue keeps what an operator sets. ``None`` declares that there is
    no limit. Raises `ConfigurationError` for a value out of range.

    >>> limits = QueueLimits(rate="100/1m", max_inflight=20, order="fair", tenant_max_inflight=5)
    """

    capacity: Whole | None = None
    max_inflight: Whole | None = None
    rate: str | RateLimit | None = None
    """maximum delivery rate: text such as ``"100/1m"``, or a `RateLimit`"""
    max_processing_time: Number | None = None
    order: Order | str = Order.FIFO
    """``"fifo"``, or ``"fair"``: tenants take turns"""
    weights: dict[str, Whole] = Field(default={})
    tenant_capacity: Whole | None = None
    tenant_max_inflight: Whole | None = None
    tenant_rate: str | RateLimit | None = None
    floor_share: Number = 0

    @field_validator("rate", "tenant_rate")
    @classmethod
    def _parsed(cls, rate: str | RateLimit | None) -> RateLimit | None:
        return RateLimit.parse(rate) if isinstance(rate, str) else rate

    @field_validator("order")
    @classmethod
    def _known(cls, order: str) -> Order:
        return Order(order)

    def model_post_init(self, _: object, /) -> None:
        """Check the values as those of the settings. Raises `ConfigurationError`."""
        checked(self.settings, "QueueLimits: ")

    @property
    def settings(self) -> dict[str, Any]:
        """The fields that were given, by their names in `QueueSettings`."""
        names = {"rate": "rate_limit", "tenant_rate": "tenant_rate_limit"}
        return {names.get(name, name): getattr(self, name) for name in self.model_fields_set}


class Stream(PolicyModel):
    """How much is kept of the events that each task of a queue streams: docs/streaming.md.

    A field that is not given is not declared: the queue keeps what an operator sets. Raises `ConfigurationError` for a
    value out of range.

    >>> stream = Stream(events=5000, ttl=600)
    """

    events: Whole = 1000
    """maximum number of events"""
    bytes: Whole = 1024 * 1024
    """maximum number of bytes of their values"""
    ttl: Number = 3600.0
    """seconds for which events are kept after the end of the task"""

    def model_post_init(self, _: object, /) -> None:
        """Check the values as those of the settings. Raises `ConfigurationError`."""
        checked(self.settings, "Stream: ")

    @property
    def settings(self) -> dict[str, Any]:
        """The fields that were given, by their names in `QueueSettings`."""
        return {f"stream_{name}": getattr(self, name) for name in self.model_fields_set}


def declared_policies(
    retry: RetryPolicy | int | None,
    limits: QueueLimits | None,
    stream: Stream | None,
    **others: object,
) -> dict[str, Any]:
    """Return the settings that the options of a task declare. Raises `ConfigurationError`, which names the option.

    ``others``: settings by their names, ``None`` if they are not declared.
    """
    declared: dict[str, Any] = {}
    if isinstance(retry, int) and not isinstance(retry, bool):
        retry = RetryPolicy(max_attempts=retry)
    if isinstance(retry, RetryPolicy):
        given = {name: getattr(retry, name) for name in retry.model_fields_set}
        declared["retry"] = DECLARED_RETRY.model_copy(update=given)
    elif retry is not None:
        raise _wrong("retry", retry, "a RetryPolicy, or a number of attempts")
    for option, policy, kind in (("limits", limits, QueueLimits), ("stream", stream, Stream)):
        if isinstance(policy, kind):
            declared |= policy.settings
        elif policy is not None:
            raise _wrong(option, policy, f"a {kind.__name__}")
    declared |= {name: value for name, value in others.items() if value is not None}
    return dict(checked(declared, ""))


def _wrong(option: str, value: object, expected: str) -> ConfigurationError:
    return ConfigurationError(f"{option}: got a {type(value).__name__}; expected {expected}")


def checked(declared: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return settings that were declared. Raises `ConfigurationError` if one of them is not allowed."""
    try:
        settings = QueueSettings.model_validate(declared)
    except ValidationError as error:
        raise ConfigurationError(where + describe(error, QueueSettings.model_fields)) from None
    return {name: getattr(settings, name) for name in declared}


class Declaration(Protocol):
    """A declared task, as far as its policies are concerned."""

    name: str
    queue: str

    @property
    def policies(self) -> Mapping[str, Any]:
        """The settings of its queue that the task declares."""


def declared_settings(
    tasks: Iterable[Declaration], retry: RetryPolicy | None = DECLARED_RETRY
) -> dict[str, dict[str, Any]]:
    """Return the settings that tasks declare, by queue; ``retry`` is the policy of queues whose tasks declare none.

    Raises `ConfigurationError` if tasks that share a queue declare different values of a setting.
    """
    queues: dict[str, dict[str, Any]] = {}
    sources: dict[tuple[str, str], str] = {}
    for task in tasks:
        settings = queues.setdefault(task.queue, {})
        for field, value in task.policies.items():
            other = sources.setdefault((task.queue, field), task.name)
            if settings.setdefault(field, value) != value:
                raise ConfigurationError(
                    f"the tasks {other!r} and {task.name!r} share the queue {task.queue!r}, but declare different "
                    f"values of {field}: declare it at one of them, or the same value at both"
                )
    for key, settings in queues.items():
        if retry is not None:
            settings.setdefault("retry", retry)
        checked(settings, f"queue {key!r}: ")
    return queues

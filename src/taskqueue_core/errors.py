"""The exceptions of the package, in one hierarchy. Some modules define further subclasses.

::

    TaskQueueError
    ├── ConfigurationError          the installation or its settings are wrong; retrying does not help
    │   ├── BackendNotFound         there is no backend with that name or path
    │   ├── InvalidBackend          the loaded object does not fulfil the contract
    │   └── CapabilityMissing       the backend lacks a capability that the caller needs
    ├── NotConnected                a declared task was published without a connection
    ├── TaskFailed                  a task ended without a result
    │   ├── TaskDead                it became a dead letter
    │   ├── TaskCancelled
    │   ├── TaskExpired             its deadline passed
    │   └── TaskDiscarded           its dead letter was discarded
    ├── ResultGone                  the task is done, but its result is no longer stored
    ├── UnknownTask                 the task was never published, or its record was deleted
    ├── InvalidResult               a result does not match the return annotation of its task
    ├── InvalidInput                a value is not allowed
    │   ├── InvalidArguments        the arguments of a publish do not match the parameters of the task
    │   ├── TooLarge                a value has more bytes than a limit allows
    │   └── UnknownKey              there is no such queue or task
    ├── PublishError
    │   ├── QueueFull               the task was refused; nothing was stored
    │   ├── IdConflict              a task with the same id but another payload is already stored
    │   └── PublishUnconfirmed      the store's response was lost: publish again with the same id
    ├── LeaseLost                   the receipt is not valid (any more); nothing was changed
    ├── SubscriptionClosed          the subscription was closed before the call
    ├── BackendUnavailable          the store is unavailable; the same call may succeed later
    ├── SettingsConflict            another process has changed the settings since they were read
    ├── QueueInUse                  a queue that has tasks or subscriptions cannot be deleted
    └── ProtocolViolation           a frame or a call breaks the socket protocol

Each exception has a ``code``: a short, stable identifier, which is also sent in HTTP errors and socket frames.
Messages never contain payloads or secrets.
"""

from __future__ import annotations

__all__ = [
    "BackendNotFound",
    "BackendUnavailable",
    "CapabilityMissing",
    "ConfigurationError",
    "IdConflict",
    "InvalidArguments",
    "InvalidBackend",
    "InvalidInput",
    "InvalidResult",
    "LeaseLost",
    "NotConnected",
    "ProtocolViolation",
    "PublishError",
    "PublishUnconfirmed",
    "QueueFull",
    "QueueInUse",
    "ResultGone",
    "SettingsConflict",
    "SubscriptionClosed",
    "TaskCancelled",
    "TaskDead",
    "TaskDiscarded",
    "TaskExpired",
    "TaskFailed",
    "TaskQueueError",
    "TooLarge",
    "UnknownKey",
    "UnknownTask",
]


class TaskQueueError(Exception):
    """The base class of all exceptions of the package."""

    code: str = "error"


class ConfigurationError(TaskQueueError):
    """The installation or its settings are wrong; retrying does not help."""

    code = "configuration"


class BackendNotFound(ConfigurationError):
    """There is no backend with the configured name, module path or ``module:attr``."""

    code = "backend_not_found"


class InvalidBackend(ConfigurationError):
    """The loaded object is not a backend: it does not fulfil the contract."""

    code = "invalid_backend"


class CapabilityMissing(ConfigurationError):
    """The backend lacks a capability that the caller needs."""

    code = "capability_missing"


class InvalidInput(TaskQueueError, ValueError):
    """A value from the caller or from another program is not allowed.

    ``field`` is the name of the field, ``allowed`` describes the allowed values, and ``got`` describes the rejected
    value, usually by its type and length. ``got`` contains no text from the value, which may be secret or large.
    """

    code = "invalid_input"

    def __init__(self, field: str, got: str, allowed: str) -> None:
        super().__init__(field, got, allowed)
        self.field = field
        self.got = got
        self.allowed = allowed

    def __str__(self) -> str:
        return f"{self.field}: got {self.got}; allowed: {self.allowed}"


class InvalidArguments(InvalidInput):
    """The arguments of a publish do not match the parameters of the task ``field``; ``got`` says which, and why."""

    code = "invalid_arguments"

    def __str__(self) -> str:
        return f"{self.field}: {self.got}"


class TooLarge(InvalidInput):
    """A value has more bytes than the limit that ``allowed`` names."""

    code = "too_large"


class UnknownKey(InvalidInput):
    """There is no queue or task with this name or id."""

    code = "unknown_key"


class NotConnected(TaskQueueError):
    """A declared task was published, or a handle was used, without a connection."""

    code = "not_connected"


class TaskFailed(TaskQueueError):
    """A task ended without a result. ``key`` and ``id`` identify the task, ``state`` is its state."""

    code = "task_failed"

    def __init__(self, message: str, *, key: str = "", id: str = "", state: str = "") -> None:  # noqa: A002 - same name as in `Task`
        super().__init__(message)
        self.key = key
        self.id = id
        self.state = state


class TaskDead(TaskFailed):
    """A task became a dead letter.

    ``reason`` says why; ``error`` and ``traceback`` are those of its last failure, or ``None``; ``attempts`` is their
    number.
    """

    code = "task_dead"
    reason: str = ""
    error: str | None = None
    traceback: str | None = None
    attempts: int = 0


class TaskCancelled(TaskFailed):
    """A task was cancelled."""

    code = "task_cancelled"


class TaskExpired(TaskFailed):
    """The deadline of a task passed before it was executed."""

    code = "task_expired"


class TaskDiscarded(TaskFailed):
    """A task became a dead letter, which was discarded."""

    code = "task_discarded"


class ResultGone(TaskQueueError):
    """A task is done, but its result is no longer stored; see the queue's setting ``result_ttl``."""

    code = "result_gone"


class UnknownTask(TaskQueueError):
    """There is no such task: it was never published, or its record was deleted after its end."""

    code = "unknown_task"


class InvalidResult(TaskQueueError):
    """A result does not match the return annotation of its task."""

    code = "invalid_result"


class PublishError(TaskQueueError):
    """A task was not accepted, or it is unknown whether it was."""

    code = "publish_failed"

    def __init__(self, message: str, *, task_id: str | None = None) -> None:
        super().__init__(message)
        self.task_id = task_id


class QueueFull(PublishError):
    """The queue refused the task; nothing was stored.

    ``code`` is the `Refusal` that the backend gave, or else ``queue_full``. ``retry_after`` is the number of seconds
    after which a retry is likely to succeed. ``depth`` is the number of tasks that counted against the capacity. Both
    may be ``None``.
    """

    code = "queue_full"

    def __init__(
        self,
        message: str,
        *,
        task_id: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        depth: int | None = None,
    ) -> None:
        super().__init__(message, task_id=task_id)
        if code is not None:
            self.code = code
        self.retry_after = retry_after
        self.depth = depth


class IdConflict(PublishError):
    """A task with this key and id but another payload is already stored; it was not changed."""

    code = "id_conflict"


class PublishUnconfirmed(PublishError):
    """The store's response was lost. Publish again with the same id: exactly one copy will be stored."""

    code = "publish_unconfirmed"


class LeaseLost(TaskQueueError):
    """The receipt is not valid: it was settled, has ended otherwise, or was never issued. Nothing was changed."""

    code = "lease_lost"


class SubscriptionClosed(TaskQueueError):
    """The subscription was closed before the call, and its deliveries were released."""

    code = "subscription_closed"


class BackendUnavailable(TaskQueueError):
    """The store cannot be reached, or cannot serve requests at present. The same call may succeed later."""

    code = "backend_unavailable"


class SettingsConflict(TaskQueueError):
    """The settings have changed since they were read. Read them again, and repeat the change."""

    code = "settings_conflict"


class QueueInUse(TaskQueueError):
    """A queue was not deleted, because it has tasks, dead letters or subscriptions."""

    code = "queue_in_use"


class ProtocolViolation(TaskQueueError):
    """A frame or a call breaks a ``rule`` of the socket protocol. If ``fatal`` is set, the socket must be closed."""

    code = "protocol"

    def __init__(self, rule: str, message: str, *, fatal: bool = True) -> None:
        super().__init__(rule, message)
        self.rule = rule
        self.message = message
        self.fatal = fatal

    def __str__(self) -> str:
        return self.message

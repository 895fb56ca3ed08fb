"""Every error that the package raises, in one hierarchy.

::

    TaskQueueError
    ├── ConfigurationError          the installation or its settings are wrong; retrying does not help
    │   ├── BackendNotFound         no backend under that name or path
    │   ├── InvalidBackend          something is there, but it does not fulfil the contract
    │   └── CapabilityMissing       the backend does not have what the caller needs
    ├── InvalidInput                a value from outside is not acceptable; names field, kind and what is allowed
    │   └── UnknownKey              an unknown task key or queue
    ├── PublishError
    │   ├── QueueFull               refused; nothing was stored
    │   ├── IdConflict              the id is taken by a task with another payload
    │   └── PublishUnconfirmed      the store's response was lost: publish again with the same id
    ├── LeaseLost                   the receipt is no longer (or never was) current; nothing was changed
    ├── SubscriptionClosed          the subscription was closed before the call
    ├── BackendUnavailable          the store is unavailable; the same call may succeed later
    ├── SettingsConflict            another process changed the settings in between
    └── ProtocolViolation           the peer of a socket broke the protocol

Each error has a ``code``: a short stable word for machines, used in HTTP problems and socket frames.
Messages never contain payloads or secrets.
"""

from __future__ import annotations

__all__ = [
    "BackendNotFound",
    "BackendUnavailable",
    "CapabilityMissing",
    "ConfigurationError",
    "IdConflict",
    "InvalidBackend",
    "InvalidInput",
    "LeaseLost",
    "ProtocolViolation",
    "PublishError",
    "PublishUnconfirmed",
    "QueueFull",
    "SettingsConflict",
    "SubscriptionClosed",
    "TaskQueueError",
    "UnknownKey",
]


class TaskQueueError(Exception):
    """The root of the hierarchy."""

    code: str = "error"


class ConfigurationError(TaskQueueError):
    """The installation or its settings are wrong."""

    code = "configuration"


class BackendNotFound(ConfigurationError):
    """No backend under the configured name, module path or ``module:attr``."""

    code = "backend_not_found"


class InvalidBackend(ConfigurationError):
    """What was loaded does not fulfil the contract."""

    code = "invalid_backend"


class CapabilityMissing(ConfigurationError):
    """The backend lacks a named capability that the caller needs."""

    code = "capability_missing"


class InvalidInput(TaskQueueError, ValueError):
    """A value from outside is not acceptable.

    ``field`` names it, ``got`` says what kind of value came (never the value itself, which may be
    secret or huge), ``allowed`` what would be accepted.
    """

    code = "invalid_input"

    def __init__(self, field: str, got: str, allowed: str) -> None:
        super().__init__(field, got, allowed)
        self.field = field
        self.got = got
        self.allowed = allowed

    def __str__(self) -> str:
        """Say all three."""
        return f"{self.field}: got {self.got}; allowed: {self.allowed}"


class UnknownKey(InvalidInput):
    """A queue or task that the backend does not know."""

    code = "unknown_key"


class PublishError(TaskQueueError):
    """A task was not (or not certainly) accepted."""

    code = "publish_failed"

    def __init__(self, message: str, *, task_id: str | None = None) -> None:
        super().__init__(message)
        self.task_id = task_id


class QueueFull(PublishError):
    """The queue refused the task; nothing was stored.

    ``code`` says whether the queue or the store is full or the intake is paused, if the backend knows. ``retry_after``
    are the seconds after which room is likely, ``depth`` is how many tasks counted against the queue's capacity.
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
    """A task with this key and id exists and has another payload; the stored one is untouched."""

    code = "id_conflict"


class PublishUnconfirmed(PublishError):
    """The store's answer was lost. Publish again with the same id: there will be exactly one copy."""

    code = "publish_unconfirmed"


class LeaseLost(TaskQueueError):
    """The receipt is not current: settled before, taken back, or never issued. Nothing was changed."""

    code = "lease_lost"


class SubscriptionClosed(TaskQueueError):
    """The subscription was closed; its deliveries were released."""

    code = "subscription_closed"


class BackendUnavailable(TaskQueueError):
    """The store is out of reach or refuses for now. The same call may succeed later."""

    code = "backend_unavailable"


class SettingsConflict(TaskQueueError):
    """The settings changed since they were read; read again, decide again."""

    code = "settings_conflict"


class ProtocolViolation(TaskQueueError):
    """The peer of a socket broke the protocol.

    ``rule`` names what was broken, ``fatal`` says if the socket must close.
    """

    code = "protocol"

    def __init__(self, rule: str, message: str, *, fatal: bool = True) -> None:
        super().__init__(rule, message)
        self.rule = rule
        self.message = message
        self.fatal = fatal

    def __str__(self) -> str:
        """Say what happened."""
        return self.message

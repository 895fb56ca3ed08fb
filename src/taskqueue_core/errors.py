"""The exceptions of the package, in one hierarchy. Some modules define further subclasses.

::

    TaskQueueError
    ├── ConfigurationError          the installation or its settings are wrong; retrying does not help
    │   ├── BackendNotFound         there is no backend with that name or path
    │   ├── InvalidBackend          the loaded object does not fulfil the contract
    │   └── CapabilityMissing       the backend lacks a capability that the caller needs
    ├── InvalidInput                a value is not allowed
    │   ├── TooLarge                a value has more bytes than a limit allows
    │   └── UnknownKey              there is no such queue or task
    ├── PublishError
    │   ├── QueueFull               the task was refused; nothing was stored
    │   ├── IdConflict              a task with the same id but another payload is already stored
    │   ├── NotUnique               another task holds the unique key, and the publish asked to be refused
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
    "InvalidBackend",
    "InvalidInput",
    "LeaseLost",
    "NotUnique",
    "ProtocolViolation",
    "PublishError",
    "PublishUnconfirmed",
    "QueueFull",
    "QueueInUse",
    "SettingsConflict",
    "SubscriptionClosed",
    "TaskQueueError",
    "TooLarge",
    "UnknownKey",
]


class TaskQueueError(Exception):
    """The base class of all exceptions of the package.

    >>> try:
    ...     await resize.handle("missing").result()
    ... except TaskQueueError as error:
    ...     print(error.code)
    unknown_task
    """

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

    >>> try:
    ...     await queue.publish("mail", priority=10)
    ... except InvalidInput as error:
    ...     print(error.field, error.allowed, sep=": ")
    priority: ...
    """

    code = "invalid_input"

    def __init__(self, field: str, got: str, allowed: str) -> None:
        super().__init__(field, got, allowed)
        self.field = field
        self.got = got
        self.allowed = allowed

    def __str__(self) -> str:
        return f"{self.field}: got {self.got}; allowed: {self.allowed}"


class TooLarge(InvalidInput):
    """A value has more bytes than the limit that ``allowed`` names."""

    code = "too_large"


class UnknownKey(InvalidInput):
    """There is no queue or task with this name or id."""

    code = "unknown_key"


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

    >>> _ = await queue.publish("mail")  # its capacity is 1
    >>> try:
    ...     await queue.publish("mail")
    ... except QueueFull as error:
    ...     print(error.code, error.depth)
    queue_full 1
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
    """A task with this key and id but another payload is already stored; it was not changed.

    >>> try:
    ...     await resize.using(id="cat-320").publish("dog.png")
    ... except IdConflict as error:
    ...     print(error.task_id)
    cat-320
    """

    code = "id_conflict"


class NotUnique(PublishError):
    """Another task, ``existing_id``, holds the unique key, and the publish asked to be refused in this case.

    >>> @tasks.task(unique=Unique(by=("user",), on_conflict="refuse"))
    ... async def rebuild(user: int) -> None: ...
    >>> first = await rebuild.publish(user=7)
    >>> try:
    ...     await rebuild.publish(user=7)
    ... except NotUnique as error:
    ...     print(error.existing_id == first.id)
    True
    """

    code = "not_unique"

    def __init__(
        self, message: str, *, task_id: str | None = None, existing_id: str | None = None
    ) -> None:
        super().__init__(message, task_id=task_id)
        self.existing_id = existing_id


class PublishUnconfirmed(PublishError):
    """The store's response was lost. Publish again with the same id: exactly one copy will be stored.

    >>> try:
    ...     handle = await resize.publish("cat.png")
    ... except PublishUnconfirmed as error:
    ...     handle = await resize.using(id=error.task_id).publish("cat.png")
    """

    code = "publish_unconfirmed"


class LeaseLost(TaskQueueError):
    """The receipt is not valid: it was settled, has ended otherwise, or was never issued. Nothing was changed.

    >>> _ = await queue.publish("mail", id="1")
    >>> async with queue.subscribe("mail", consumer="reader") as subscription:
    ...     (delivery,) = (await subscription.receive(1, 5)).deliveries
    ...     await backend.control.cancel("mail", "1")
    ...     try:
    ...         await subscription.ack(delivery)
    ...     except LeaseLost as error:
    ...         print(error.code)
    True
    lease_lost
    """

    code = "lease_lost"


class SubscriptionClosed(TaskQueueError):
    """The subscription was closed before the call, and its deliveries were released."""

    code = "subscription_closed"


class BackendUnavailable(TaskQueueError):
    """The store cannot be reached, or cannot serve requests at present. The same call may succeed later.

    >>> try:
    ...     async with connect("server") as server:
    ...         await server.publish("mail")
    ... except BackendUnavailable as error:
    ...     print(error)
    no response from a server at http://127.0.0.1:1 ...
    """

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

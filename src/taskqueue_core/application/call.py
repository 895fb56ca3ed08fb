"""Calls of declared tasks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from msgspec import Raw
from typing_extensions import Unpack

from taskqueue_core.application.encoding import Encoding
from taskqueue_core.application.outputs import Output
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import check_headers, duration
from taskqueue_core.queue import PublishOptions, Queue
from taskqueue_core.schedules import InstantForm, TaskTemplate
from taskqueue_core.sync import SyncQueue
from taskqueue_core.tasks import Confirmation, Task
from taskqueue_core.uniqueness import UniqueKey

R_co = TypeVar("R_co", covariant=True)


class CallOptions(PublishOptions, total=False):
    """The options of `TaskFunction.using`: those of `taskqueue_core.Queue.publish`, and the connection to use."""

    on: Queue | SyncQueue


_OF_SCHEDULES = (
    *("headers", "priority", "tenant", "ordering_key", "max_attempts", "expires_in"),
    *("unique", "tags"),
)
OPTIONS = frozenset(CallOptions.__annotations__) | frozenset(PublishOptions.__annotations__)
"""the names of the options of `TaskFunction.using`"""


@runtime_checkable
class DeclaredTask(Protocol[R_co]):
    """What a call needs of its task function."""

    name: str
    queue: str
    changes: CallOptions

    @property
    def middleware(self) -> Sequence[PublishMiddleware]:
        """The middleware around the task, the outermost first."""

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers with which the task is published."""

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags with which the task is published."""

    @property
    def policies(self) -> Mapping[str, Any]:
        """The settings of its queue that the task declares."""

    @property
    def encoding(self) -> Encoding | None:
        """What encodes its payloads, results and errors, if its registry has a codec."""

    def using(self, **options: Unpack[CallOptions]) -> DeclaredTask[R_co]:
        """Return a copy with other options."""

    def connection(self) -> Queue:
        """Return the connection through which it is published."""

    def sync_connection(self) -> SyncQueue:
        """Return the connection through which it is published by code without an event loop."""

    async def task(self, queue: Queue, text: bytes) -> Task:
        """Return the task to publish."""

    def unique_key(self, text: bytes, instants: Collection[str] = ()) -> UniqueKey | None:
        """Return the unique key of a call with these arguments."""

    def read_result(self, text: bytes) -> R_co:
        """Decode a result."""


class Call(Generic[R_co]):
    """A declared task with its arguments and options, ready to be published. `payload` is not encoded by a codec.

    >>> calls = [resize.call(name) for name in names]
    >>> len(await tasks.publish_many(calls))
    2
    """

    __slots__ = ("function", "instants", "outputs", "payload")

    def __init__(
        self,
        function: DeclaredTask[R_co],
        payload: bytes,
        instants: Mapping[str, InstantForm] = MappingProxyType({}),
        outputs: tuple[Output, ...] = (),
    ) -> None:
        """Store the call. ``function`` has the options, ``payload`` is JSON text.

        ``instants``: arguments that are missing there, because they are `taskqueue_core.Instant`. ``outputs``: the
        outputs of steps that it refers to.
        """
        self.function = function
        self.payload = payload
        self.instants = instants
        self.outputs = outputs

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of the publish, read-only."""
        return MappingProxyType(dict(self.function.changes))

    def using(self, **options: Unpack[CallOptions]) -> Call[R_co]:
        """Return a copy with these options, in addition to those that it has. Raises `InvalidInput`.

        >>> traced = call.using(headers={**call.options.get("headers", {}), "trace": "17"})
        """
        return Call(self.function.using(**options), self.payload, self.instants, self.outputs)

    async def task(self, queue: Queue) -> Task:
        """Return the task to publish. Raises `InvalidInput`."""
        if self.instants:
            raise InvalidInput(
                min(self.instants), "Instant", "a value: only the call of a schedule has an instant"
            )
        self._demand_values()
        return await self.function.task(queue, self.payload)

    def _demand_values(self) -> None:
        if self.outputs:
            raise InvalidInput(
                "arguments", "the output of a step", "values: only a step of a workflow has outputs"
            )

    def template(self) -> TaskTemplate:
        """Return the task that a schedule publishes for this call.

        Raises `InvalidInput` for an option that is not one of a schedule's call, such as ``delay`` or ``id``.
        """
        self._demand_values()
        options: dict[str, Any] = {**self.function.changes}
        options.pop("on", None)
        for name in options:
            if name not in _OF_SCHEDULES:
                raise InvalidInput(
                    name,
                    "an option that the call of a schedule cannot have",
                    ", ".join(_OF_SCHEDULES),
                )
        if options.get("expires_in") is not None:
            options["expires_in"] = duration("expires_in", options["expires_in"])
        given = options.get("headers") or {}
        check_headers("headers", given)
        options["headers"] = {**given, **self.function.headers}
        options["unique"] = self.function.unique_key(self.payload, self.instants)
        options["tags"] = self.function.tags
        payload, encoding = self.payload, self.function.encoding
        if encoding is not None:
            payload = encoding.template(payload, instants=bool(self.instants))
            options["content_digest"] = encoding.content_digest("", self.payload)
        return TaskTemplate(
            key=self.function.queue,
            payload=Raw(payload),
            instants=dict(self.instants),
            **options,
        )


class PublishMiddleware(Protocol):
    """Code around each publish of the tasks of a registry."""

    async def publish(
        self, call: Call[Any], send: Callable[[Call[Any]], Awaitable[Confirmation]]
    ) -> Confirmation:
        """Publish a call, or another one, with ``send``, and return the confirmation."""

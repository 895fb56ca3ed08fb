"""Declared tasks: functions that an application calls, or publishes with the same arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Generic, ParamSpec, cast

import msgspec
from msgspec.structs import force_setattr as set_field
from pydantic import PydanticUserError
from typing_extensions import TypeVar, Unpack

from taskqueue_core.application.arguments import Arguments, BatchArguments, InvalidPayload
from taskqueue_core.application.arguments_with_outputs import write_with_outputs
from taskqueue_core.application.call import OPTIONS, Call, CallOptions
from taskqueue_core.application.connections import Connections
from taskqueue_core.application.encoding import (
    CODEC_HEADER,
    Encoding,
    decoded_payload,
    decoded_result,
)
from taskqueue_core.application.errors import InvalidArguments
from taskqueue_core.application.handles import Handle
from taskqueue_core.application.instants import write_with_instants
from taskqueue_core.application.middleware import Middleware
from taskqueue_core.application.outputs import has_outputs
from taskqueue_core.application.publishing import publish_calls
from taskqueue_core.application.results import Results
from taskqueue_core.application.sync_handles import SyncHandle
from taskqueue_core.application.task_options import TaskOptions
from taskqueue_core.application.type_errors import schema_error
from taskqueue_core.application.unique_work import UniqueWork
from taskqueue_core.confirmations import stored
from taskqueue_core.errors import ConfigurationError, InvalidInput
from taskqueue_core.limits import check_headers, check_tags
from taskqueue_core.policy_model import nearest_first
from taskqueue_core.protocol.frames import WireTask
from taskqueue_core.queue import PublishOptions, Queue
from taskqueue_core.schedules import is_instant
from taskqueue_core.sync import SyncQueue
from taskqueue_core.tasks import DEFAULT_PRIORITY, Confirmation, Task, checked_task, new_id
from taskqueue_core.uniqueness import Unique, UniqueKey, sha256
from taskqueue_core.workflows import with_inputs

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
C_co = TypeVar("C_co", covariant=True, default=Any)

TASK_HEADER = "taskqueue-task"
"""header with the name of the task, in a queue that several tasks share"""
SCHEMA_HEADER = "taskqueue-schema"
"""header with the fingerprint of the schema by which the payload was written"""


class TaskFunction(Generic[P, R_co, C_co]):
    """A declared task. Calling it calls the function; publishing it lets a worker call the function.

    `taskqueue_core.Tasks.task` creates it. ``P`` are the parameters of the function without its context,
    ``R_co`` is the type of the result, and ``C_co`` is what a call returns: a coroutine, if the function is async.

    >>> resize("cat.png", width=64)
    {'width': 64}
    >>> handle = await resize.publish("cat.png", width=64)
    """

    def __init__(
        self,
        registry: Connections,
        function: Callable[..., Any],
        name: str,
        queue: str,
        options: TaskOptions,
    ) -> None:
        """Inspect the function's signature. Raises `ConfigurationError` if arguments cannot be published by name."""
        self.name = name
        """name of the task"""
        self.queue = queue
        """name of its queue: the name of the task, unless several tasks share a queue"""
        self.function = function
        """the function itself"""
        self.options = options
        self.is_async = _is_async(name, function)
        """whether a call returns a coroutine"""
        if self.is_async and options.run == "thread":
            raise ConfigurationError(
                f"the task {name!r} is an async function, which cannot run in a thread: use run='auto' or 'process'"
            )
        self.arguments = BatchArguments(function) if options.batch else Arguments(function)
        signature = self.arguments.signature
        self._work = UniqueWork(name, signature, batch=bool(options.batch))
        if options.unique is not None:
            self._work.check(options.unique)
        self.results = Results(function, batch=bool(options.batch))
        self.registry = registry
        """the registry that declares it"""
        self.changes: CallOptions = {}
        """the options of `using`"""
        self._headers: dict[str, str] = {}  # also of the copies that `using` makes
        functools.update_wrapper(cast("Callable[..., Any]", self), function, updated=())
        own = dir(self)  # attributes that a decorator gave the function must not replace these
        given = getattr(function, "__dict__", {})
        vars(self).update({key: value for key, value in given.items() if key not in own})

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> C_co:
        """Call the function in this process, without a queue, and without a worker that opens dependencies.

        Raises `InvalidArguments` if a dependency is not passed.
        """
        if names := self.arguments.dependencies:
            given = inspect.signature(self.function).bind_partial(*args, **kwargs).arguments
            if missing := names - given.keys():
                raise InvalidArguments(
                    self.name,
                    f"{min(missing)} is a dependency: pass it to a direct call",
                    "all dependencies",
                )
        return cast("C_co", self.function(*args, **kwargs))

    def __repr__(self) -> str:
        return f"<task {self.name}>"

    @property
    def policies(self) -> Mapping[str, Any]:
        """The settings of its queue that the task declares."""
        return self.options.policies

    def using(self, **options: Unpack[CallOptions]) -> TaskFunction[P, R_co, C_co]:
        """Return a copy that publishes with these options, in addition to those that it has. This one is not changed.

        Raises `InvalidInput` for an option that does not exist.

        >>> handle = await resize.using(priority=9, tenant="acme").publish("cat.png")
        """
        if unknown := options.keys() - OPTIONS:
            name = min(unknown)
            known = nearest_first(name, sorted(OPTIONS))
            raise InvalidInput("using", f"the unknown option {name!r}", known)
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy.changes = cast("CallOptions", {**self.changes, **options})
        return copy

    async def publish(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R_co]:
        """Publish the task, and return its handle once it is stored.

        If another task holds the unique key, the handle is that task's. Arguments are checked and encoded by the
        annotations of the function. The connection is the one of ``using(on=...)``, inside a handler the one of its
        worker, or else the one that `taskqueue_core.Tasks.connect` opened. Raises `InvalidArguments`, `NotConnected`,
        what middleware raises, and the errors of `taskqueue_core.Queue.publish`.

        >>> handle = await resize.publish("cat.png", width=320)
        """
        registry, encoding = self.registry, self.registry.encoding
        limit = "payload" if encoding is None else "decoded"
        text = self.arguments.write(self.name, args, kwargs, limit)
        queue = registry.queue(self.changes.get("on"), self.name)
        if registry.middleware:
            (handle,) = await publish_calls(queue, [Call(self, text)], self.changes.get("wait", 0))
            if handle.confirmation is not None:
                stored(handle.confirmation)
            return handle
        task = await self.task(queue, text)
        confirmation = await queue.publish_task(task, wait=self.changes.get("wait", 0))
        task_id = confirmation.existing_id or confirmation.task_id
        return Handle(self.queue, task_id, queue, self.read_result, confirmation, encoding=encoding)

    def publish_sync(self, *args: P.args, **kwargs: P.kwargs) -> SyncHandle[R_co]:
        """Publish the task from code without an event loop, as `publish` does; ``connect_sync`` opens the connection.

        Inside a synchronous handler, the connection is the one of its worker.

        >>> handle = resize.publish_sync("cat.png", width=320)
        """
        queue = self.sync_connection()
        return SyncHandle(queue, queue.run(self.using(on=queue.queue).publish(*args, **kwargs)))

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call[R_co]:
        """Check and encode arguments, without publishing. Raises `InvalidArguments`.

        In the call of a schedule, an argument may be `taskqueue_core.Instant`. In a step of a
        `taskqueue_core.Workflow`, an argument may be the output of another step, or contain some.

        >>> handles = await tasks.publish_many(resize.call(name) for name in names)
        """
        if any(map(is_instant, (*args, *kwargs.values()))):
            return Call(
                self, *write_with_instants(self.arguments, self.name, args, kwargs, self._limit)
            )
        try:
            return Call(self, self.arguments.write(self.name, args, kwargs, self._limit))
        except (InvalidArguments, TypeError):
            if not has_outputs(
                *args, *kwargs.values()
            ):  # not looked for before, because it takes long
                raise
        text, outputs = write_with_outputs(self.arguments, self.name, args, kwargs, self._limit)
        return Call(self, text, outputs=outputs)

    def handle(self, task_id: str) -> Handle[R_co]:
        """Return the handle of a task that was published elsewhere. Raises `NotConnected`.

        >>> await resize.handle("cat-320").result(timeout=30)
        {'width': 320}
        """
        return self._handle(self.connection(), task_id)

    def handle_sync(self, task_id: str) -> SyncHandle[R_co]:
        """Return the handle of a task that was published elsewhere, for code without an event loop.

        >>> resize.handle_sync("cat-320").result(timeout=30)
        {'width': 320}
        """
        queue = self.sync_connection()
        return SyncHandle(queue, self._handle(queue.queue, task_id))

    def _handle(
        self, queue: Queue, task_id: str, confirmation: Confirmation | None = None
    ) -> Handle[R_co]:
        return Handle(
            self.queue, task_id, queue, self.read_result, confirmation, encoding=self.encoding
        )

    @property
    def _limit(self) -> str:
        return "payload" if self.encoding is None else "decoded"

    def connection(self) -> Queue:
        """Return the connection through which it is published. Raises `NotConnected`."""
        return self.registry.queue(self.changes.get("on"), self.name)

    def sync_connection(self) -> SyncQueue:
        """Return the connection through which code without an event loop publishes it. Raises `NotConnected`."""
        return self.registry.sync_queue(self.changes.get("on"), self.name)

    async def task(self, queue: Queue, text: bytes) -> Task:
        """Return the task to publish. ``text``: the arguments as JSON text. Raises `InvalidInput`."""
        own = self.options
        if self.changes or own.unique is not None or own.tags:
            options: dict[str, Any] = {**self.changes}
            options.pop("on", None)
            options |= {"unique": self.unique_key(text), "tags": self.tags}
            if given := options.get("headers"):
                check_headers("headers", given)
                options["headers"] = {**given, **self.headers}
                if self.encoding is None:  # headers of an encoded task were copied
                    options["headers"].pop(CODEC_HEADER, None)
            task = await queue.task_of(self.queue, text, cast("PublishOptions", options))
        else:
            task = checked_task(self.queue, new_id(), DEFAULT_PRIORITY, text)
        if not task.headers:
            set_field(
                task, "headers", {**(self._headers or self.headers)}
            )  # these headers need no check
        if self.encoding is not None:
            set_field(task, "payload", self.encoding.payload(text))
            set_field(task, "content_digest", self.encoding.content_digest(task.id, text))
        return task

    def unique_key(self, text: bytes, instants: Collection[str] = ()) -> UniqueKey | None:
        """Return the unique key of a call: that of `using`, or else that of the declaration. Raises `InvalidInput`.

        ``text``: the arguments as JSON text, without those named in ``instants``, which are `taskqueue_core.Instant`.
        """
        unique = self.changes.get("unique", self.options.unique)
        if isinstance(unique, Unique):
            digest = sha256 if self.encoding is None else self.encoding.digest
            tenant = self.changes.get("tenant")
            return self._work.key(unique, text, tenant, instants, digest)
        return unique

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags of a publish: those that the task declares, then those of `using`. Raises `InvalidInput`."""
        given = self.changes.get("tags", ())
        check_tags("tags", given)
        return tuple(dict.fromkeys((*self.options.tags, *given)))

    @property
    def middleware(self) -> tuple[Middleware, ...]:
        """The middleware of its registry, and before it that of the registries that include it."""
        return self.registry.middleware

    @property
    def encoding(self) -> Encoding | None:
        """What encodes its payloads, results and errors: the codec of its registry."""
        return self.registry.encoding

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers with which the task is published, for publishers in other languages."""
        headers = self._headers
        if not headers:
            headers |= {} if self.queue == self.name else {TASK_HEADER: self.name}
            if fingerprint := self.arguments.fingerprint:
                headers[SCHEMA_HEADER] = fingerprint
            if self.encoding is not None:
                headers[CODEC_HEADER] = self.encoding.header
        return headers

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the payload, for publishers in other languages.

        Raises `ConfigurationError` if a parameter has a type without one; such a task can be published from Python.

        >>> resize.schema()["required"]
        ['image']
        """
        try:
            return self.arguments.schema()
        except PydanticUserError as error:
            raise schema_error(self.name, self.arguments.fields, error) from None

    def read_result(self, text: bytes) -> R_co:
        """Decode a result by the return annotation of the function; if that handles batches, by that of its list.

        Raises pydantic's ``ValidationError``, and `Undecodable`.
        """
        return cast("R_co", self.results.read(decoded_result(self.encoding, text)))

    def read(self, task: Task | WireTask, inputs: Sequence[bytes | msgspec.Raw | None] = ()) -> Any:
        """Decode the payload of a task, with results of other tasks. Raises `InvalidPayload` and `Undecodable`."""
        payload = bytes(task.payload)
        if task.headers:
            payload = decoded_payload(self.encoding, task.headers, payload)
        if inputs:
            texts = [
                None if each is None else decoded_result(self.encoding, bytes(each))
                for each in inputs
            ]
            try:
                payload = with_inputs(payload, texts)
            except InvalidInput as error:
                raise InvalidPayload(str(error)) from None
        return self.arguments.read(payload)


def _is_async(name: str, function: Callable[..., Any]) -> bool:
    """Return whether calls of a function return a coroutine. Raises `ConfigurationError` for a generator or a class."""
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    if isinstance(inner, type):
        raise ConfigurationError(
            f"the task {name!r} is the class {inner.__name__}; expected a function: declare one, or a method of an "
            f"object, as in tasks.task(mailer.send)"
        )
    call = inner if inspect.isroutine(inner) else getattr(inner, "__call__", inner)  # noqa: B004 - not a check that the object is callable
    if inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call):
        raise ConfigurationError(f"the task {name!r} is a generator: use a function without yield")
    return inspect.iscoroutinefunction(call)


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function. Raises `ConfigurationError` if it has none."""
    inner: Any = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    name = getattr(inner, "__name__", None)
    if not isinstance(name, str) or name == "<lambda>":
        raise ConfigurationError(
            f"a {type(function).__name__} without a name cannot be a task: give a name, as in @tasks.task('name')"
        )
    return name


def location_of(function: Callable[..., Any]) -> str:
    """Return the module and the qualified name of a function."""
    inner: Any = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    return f"{inner.__module__}.{getattr(inner, '__qualname__', type(inner).__qualname__)}"

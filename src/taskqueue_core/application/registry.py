"""The registry in which an application declares its tasks. Declaring does no I/O."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from types import MappingProxyType
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, overload

from taskqueue_core.application.applying import Applied, apply_declarations
from taskqueue_core.application.call import Call
from taskqueue_core.application.codecs import AnyCodec
from taskqueue_core.application.connections import Connections
from taskqueue_core.application.context import Context
from taskqueue_core.application.declared_schedules import DeclaredSchedules
from taskqueue_core.application.encoding import demand_codec
from taskqueue_core.application.errors import InvalidArguments
from taskqueue_core.application.lifespan import LifespanFunction, checked_lifespan
from taskqueue_core.application.middleware import Middleware
from taskqueue_core.application.policies import (
    QueueLimits,
    Stream,
    declared_policies,
    declared_settings,
)
from taskqueue_core.application.rules import ErrorRules
from taskqueue_core.application.task_decorator import TaskDecorator
from taskqueue_core.application.task_function import TaskFunction, location_of, name_of
from taskqueue_core.application.task_options import TaskOptions
from taskqueue_core.application.type_errors import check_declared_name, check_prefix
from taskqueue_core.errors import ConfigurationError, InvalidInput
from taskqueue_core.limits import kind_of
from taskqueue_core.policy_model import nearest_first
from taskqueue_core.retry import RetryPolicy
from taskqueue_core.schedules import Cron, Every, Schedule
from taskqueue_core.uniqueness import Unique

L = TypeVar("L", bound=LifespanFunction)
P = ParamSpec("P")
R = TypeVar("R")


class Tasks(Connections):
    """A registry of declared tasks. Publishers, workers, tests and the command line import it.

    ``prefix`` is put before the name of each task. ``middleware`` is called around each publish and each run of them,
    and of the tasks of registries that this one includes; the first is the outermost. ``codec`` encodes the payloads,
    results and error texts of the tasks of this registry, for example encrypts them: see docs/codecs.md.

    >>> tasks = Tasks(prefix="shop.")
    >>> @tasks.task
    ... def resize(image: str, width: int = 320) -> dict[str, int]:
    ...     return {"width": width}
    """

    def __init__(
        self,
        *,
        prefix: str = "",
        codec: AnyCodec | None = None,
        middleware: Sequence[Middleware] = (),
    ) -> None:
        """Create an empty registry.

        Raises `ConfigurationError` if a name cannot begin with ``prefix``, or ``codec`` or ``middleware`` is not such.
        """
        check_prefix(prefix)
        super().__init__(middleware, codec)
        self._prefix = prefix
        self._functions: dict[str, TaskFunction[..., Any]] = {}
        self._schedules: dict[str, Schedule] = {}
        self._included: list[Tasks] = []
        self._lifespan: Callable[[], AbstractAsyncContextManager[Any]] | None = None

    @property
    def functions(self) -> Mapping[str, TaskFunction[..., Any]]:
        """The declared tasks by name, in the order of declaration."""
        return MappingProxyType(self._functions)

    @overload
    def task(
        self, function: Callable[Concatenate[Context[Any], P], Coroutine[Any, Any, R]], /
    ) -> TaskFunction[P, R, Coroutine[Any, Any, R]]: ...
    @overload
    def task(
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> TaskFunction[P, R, Coroutine[Any, Any, R]]: ...
    @overload
    def task(
        self, function: Callable[Concatenate[Context[Any], P], R], /
    ) -> TaskFunction[P, R, R]: ...
    @overload
    def task(self, function: Callable[P, R], /) -> TaskFunction[P, R, R]: ...
    @overload
    def task(
        self,
        name: str | None = None,
        /,
        *,
        queue: str | None = None,
        retry: RetryPolicy | int | None = None,
        timeout: float | None = None,
        limits: QueueLimits | None = None,
        stream: Stream | None = None,
        on_error: ErrorRules | None = None,
        result_ttl: float | None = None,
        batch: int | None = None,
        run: Literal["auto", "thread", "process"] = "auto",
        schedule: Cron | Every | None = None,
        unique: Unique | None = None,
        tags: tuple[str, ...] = (),
        index: tuple[str, ...] | None = None,
        keep_ended: float | None = None,
        keep_ended_most: int | None = None,
    ) -> TaskDecorator: ...

    def task(
        self,
        function: Callable[..., Any] | str | None = None,
        /,
        *,
        queue: str | None = None,
        retry: RetryPolicy | int | None = None,
        timeout: float | None = None,
        limits: QueueLimits | None = None,
        stream: Stream | None = None,
        on_error: ErrorRules | None = None,
        result_ttl: float | None = None,
        batch: int | None = None,
        run: Literal["auto", "thread", "process"] = "auto",
        schedule: Cron | Every | None = None,
        unique: Unique | None = None,
        tags: tuple[str, ...] = (),
        index: tuple[str, ...] | None = None,
        keep_ended: float | None = None,
        keep_ended_most: int | None = None,
        **unknown: object,
    ) -> Any:
        """Declare a function as a task: ``@tasks.task``, or ``@tasks.task("name", timeout=30)``.

        The name of the task, which is also the name of its queue, is the prefix of the registry and ``name``, by
        default the name of the function. With ``queue``, tasks share a queue, its limits and its ordering keys. With
        ``batch``, one call of the function handles up to ``batch`` tasks: see docs/workers.md.

        ``on_error`` says by class what exceptions mean: `Retry`, `Reject` or `Snooze`, or a function of the exception
        and the context that returns one of these, or ``None`` for the retry policy. The most specific class decides.

        ``run`` is where a worker calls the function. ``auto``: an async function in the event loop, any other in a
        thread; ``thread``: refuse an async function; ``process``: in a child process, one task at a time, which a
        timeout, a cancel or a lost lease kills.

        ``schedule`` lets the store publish the task at these times, without arguments, once `apply` has written it;
        `schedule` has more options.

        With ``unique``, at most one task with equal arguments is live: see `Unique`, and docs/unique.md. ``tags`` are
        those of all its tasks; a publish may add others.

        The other options are settings of the queue, which `apply` writes: ``retry`` is a policy or a number of
        attempts, by default 10 attempts after 2, 4, 8 ... seconds, up to 10 minutes; after ``timeout`` seconds an
        attempt fails; ``limits`` hold for all workers together; results are kept for ``result_ttl`` seconds, events as
        ``stream`` says. Lists find tasks by the tags that ``index`` names, and ended ones for ``keep_ended`` seconds,
        at most ``keep_ended_most`` of each state.

        Raises `ConfigurationError` if a name is not allowed or taken, an option is out of range, a rule is wrong,
        ``unique`` names what is no argument, the arguments of the function cannot be published by name, or another task
        declares other settings for the queue.

        >>> @tasks.task("crop", retry=5, timeout=30, limits=QueueLimits(rate="100/1m"))
        ... async def crop(image: str, width: int = 320) -> dict[str, int]:
        ...     return {"width": width}
        """
        if not isinstance(self, Tasks):
            raise ConfigurationError(
                f"task: got a {type(self).__name__} instead of a registry: write 'tasks = Tasks()', and '@tasks.task'"
            )
        for option in unknown:
            parameters = inspect.signature(Tasks.task).parameters.values()
            known = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
            raise ConfigurationError(
                f"task: there is no option {option!r}; the options are {nearest_first(option, known)}"
            )
        policies = declared_policies(
            *(retry, limits, stream),
            timeout=timeout,
            result_ttl=result_ttl,
            index=index,
            keep_ended=keep_ended,
            keep_ended_most=keep_ended_most,
        )
        options = TaskOptions.of(policies, batch, on_error, run, unique=unique, tags=tags)
        if callable(function):
            return self._add(function, None, queue, options, schedule)
        if function is not None and not isinstance(function, str):
            raise ConfigurationError(
                f"task: got a {type(function).__name__}; expected a function, or a name as text"
            )
        return lambda declared: self._add(declared, function, queue, options, schedule)

    def _add(
        self,
        function: Callable[..., Any],
        name: str | None,
        queue: str | None,
        options: TaskOptions,
        schedule: Cron | Every | None,
    ) -> TaskFunction[..., Any]:
        if not callable(function):
            raise ConfigurationError(f"task: got a {type(function).__name__}; expected a function")
        if isinstance(function, TaskFunction):  # a task of another registry
            function = function.function
        whole = self._prefix + (name_of(function) if name is None else name)
        check_declared_name(whole, "name of the task")
        if queue is not None:
            check_declared_name(queue, "queue")
        if options.batch and queue not in (None, whole):
            raise ConfigurationError(
                f"the task {whole!r} shares the queue {queue!r}, so it cannot handle batches: give it its own queue"
            )
        declared: TaskFunction[..., Any] = TaskFunction(
            self, function, whole, queue or whole, options
        )
        self._register(declared)
        if schedule is not None:
            self._schedule(whole, schedule, declared.call)
        return declared

    def schedule(
        self,
        name: str,
        call: Call[Any],
        when: Cron | Every,
        *,
        catch_up: Literal["none", "last", "all"] = "last",
        late: float = 3600,
        overlap: Literal["skip", "allow", "wait", "replace"] = "skip",
        jitter: float = 0,
        starts: datetime | None = None,
        ends: datetime | None = None,
        paused: bool = False,
    ) -> Schedule:
        """Declare a schedule: the store publishes ``call`` at the times ``when``, once `apply` has written it.

        Its name is the prefix of the registry and ``name``. The other options are fields of `taskqueue_core.Schedule`.
        Raises `ConfigurationError`, which names the field, for a value that is not allowed and for a name that is
        taken.

        >>> schedule = tasks.schedule("cats", resize.call("cats.png"), Cron("0 7 * * *", timezone="Asia/Tokyo"))
        >>> schedule.name
        'shop.cats'
        """
        if not isinstance(name, str):
            raise ConfigurationError(f"name: got a {type(name).__name__}; expected text")
        return self._schedule(
            self._prefix + name,
            when,
            lambda: call,
            catch_up=catch_up,
            late=late,
            overlap=overlap,
            jitter=jitter,
            starts=starts,
            ends=ends,
            paused=paused,
        )

    def _schedule(
        self, name: str, when: Cron | Every, call: Callable[[], Call[Any]], **options: Any
    ) -> Schedule:
        try:
            schedule = Schedule(name, when, call(), **options)
        except InvalidArguments as error:
            raise ConfigurationError(
                f"schedule of the task {name!r}: it is called without arguments, but {error.got}: declare the "
                "schedule with tasks.schedule(name, task.call(...), when)"
            ) from error
        except InvalidInput as error:
            raise ConfigurationError(f"schedule {name!r}: {error}") from error
        self._register_schedule(schedule)
        return schedule

    def _register_schedule(self, schedule: Schedule) -> None:
        if self._schedules.get(schedule.name, schedule) is not schedule:
            raise ConfigurationError(
                f"the name {schedule.name!r} is taken by another schedule of this registry: give another name"
            )
        self._schedules[schedule.name] = schedule
        for parent in self._parents:
            parent._register_schedule(schedule)  # noqa: SLF001 - an attribute of the same class

    @property
    def schedules(self) -> Mapping[str, Schedule]:
        """The declared schedules by name, in the order of declaration."""
        return MappingProxyType(self._schedules)

    def declared_schedules(self) -> DeclaredSchedules:
        """Return the schedules of this registry and of those that it includes, for `apply`."""
        return DeclaredSchedules(
            owner=self._prefix,
            prefixes=self._prefixes(),
            queues=frozenset(function.queue for function in self._functions.values()),
            schedules=self.schedules,
        )

    def _prefixes(self) -> frozenset[str]:
        return frozenset({self._prefix}).union(*(each._prefixes() for each in self._included))  # noqa: SLF001 - as above

    def _register(self, function: TaskFunction[..., Any]) -> None:
        known = self._functions.get(function.name, function)
        if known is not function:
            raise ConfigurationError(
                f"the name {function.name!r} is taken by another task of this registry, the function "
                f"{location_of(known.function)}: give another name, as in @tasks.task('name')"
            )
        # This raises `ConfigurationError` if another task of the queue declares other settings.
        shared = [each for each in self._functions.values() if each.queue == function.queue]
        declared_settings([*shared, function])
        self._functions[function.name] = function
        for parent in self._parents:
            parent._register(function)  # noqa: SLF001 - an attribute of the same class

    async def apply(self, *, prune: bool = False, dry_run: bool = False) -> Applied:
        """Write the policies of all tasks into the settings of their queues, and the schedules, into the store.

        Each queue is changed at once. Only fields that the declaration owns are changed; what an operator has set
        stays, until it is given back with ``taskqueue queue set KEY --give-back FIELD``. With ``prune``, fields that
        were declared before and are declared no more get their defaults. With ``dry_run``, nothing is written.

        A schedule is created or replaced, but a pause stays in force, and a schedule of the same name that was put at
        run time stays as it is. With ``prune``, schedules that this registry, known by its prefix, declared before and
        declares no more are deleted.

        Raises `SettingsConflict` if other programs keep changing the settings, `CapabilityMissing` if the backend
        cannot keep a setting, `ConfigurationError` if a setting contradicts one of an operator, and `NotConnected`.

        >>> applied = await tasks.apply(dry_run=True)
        """
        backend = self.queue().backend
        declared = declared_settings(self._functions.values())
        schedules = [self.declared_schedules()]
        return await apply_declarations(backend, declared, schedules, prune=prune, dry_run=dry_run)

    def include(self, *others: Tasks) -> None:
        """Add the tasks and schedules of other registries, also those that are declared there later.

        They are published through the connection of this registry, unless theirs has one. Each registry has its own
        codec. Raises `ConfigurationError` if a name is taken, or this registry has a codec and another one has none.

        >>> mail, images = Tasks(prefix="mail."), Tasks(prefix="images.")
        >>> tasks.include(mail, images)
        """
        for other in others:
            if not isinstance(other, Tasks):
                raise ConfigurationError(
                    f"include: got {kind_of(other)}; expected a Tasks object, as in tasks.include(mail.tasks)"
                )
            if other is self or other in self.ancestors():
                raise ConfigurationError("a registry cannot include itself")
            if other in self._included:
                continue
            demand_codec(self.encoding, other.encoding, other._prefix)  # noqa: SLF001 - as below
            for function in other._functions.values():  # noqa: SLF001 - an attribute of the same class
                self._register(function)
            for schedule in other._schedules.values():  # noqa: SLF001 - as above
                self._register_schedule(schedule)
            other._parents.append(self)  # noqa: SLF001 - an attribute of the same class
            self._included.append(other)

    def lifespan(self, function: L, /) -> L:
        """Make a worker run ``function`` around its work: up to its yield before the first task, the rest at the end.

        The function is async, has one ``yield`` and no parameters, and runs once per worker process. What it yields is
        `Context.state` in the handlers of this registry, and of those that it includes, unless they have a lifespan. If
        it raises an exception, the worker ends with it. Raises `ConfigurationError` if the function is not like that,
        or the registry has a lifespan already.

        >>> @tasks.lifespan
        ... async def lifespan() -> AsyncIterator[Pool]:
        ...     async with open_pool() as pool:
        ...         yield pool
        """
        opened = checked_lifespan(function)
        if self._lifespan is not None:
            raise ConfigurationError(
                "this registry has a lifespan already: open everything in one function"
            )
        self._lifespan = opened
        return function

    def lifespans(self) -> dict[Tasks, Callable[[], AbstractAsyncContextManager[Any]]]:
        """Return the lifespans of the registries that this one includes, and then its own, by registry."""
        found: dict[Tasks, Callable[[], AbstractAsyncContextManager[Any]]] = {}
        for other in self._included:
            found |= other.lifespans()
        return found if self._lifespan is None else found | {self: self._lifespan}

"""Dependencies of handlers: parameters whose values a worker opens for each call, or once for its life."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Annotated, Any, TypeAlias, TypeVar, cast, get_args, get_origin, overload

from taskqueue_core.application.context import CONTEXT, Context
from taskqueue_core.errors import ConfigurationError

T = TypeVar("T")
Factory: TypeAlias = Callable[..., Any]
_OTHERS = {"Depends", "Dependant", "Dependency", "Security", "Shared", "TaskiqDepends"}
"""names of the classes of other libraries that declare dependencies"""
_overrides: dict[Factory, Factory] = {}


class DeclaredDependency:
    """A dependency as the default value of a parameter.

    The library ``uncalled_for`` resolves it for a call, and is imported only then: most publishers need none of it.
    """

    def __init__(self, factory: Factory, *, shared: bool) -> None:
        """Declare a dependency on what ``factory`` returns, once per call of a handler, or once per worker."""
        self.declared = factory
        self.shared = shared

    @property
    def factory(self) -> Factory:
        """The function to call: the declared one, unless a test replaces it."""
        return _overrides.get(self.declared, self.declared)

    def for_parameter(self, _name: str) -> DeclaredDependency:
        """Return the dependency for a parameter: it is the same for all."""
        return self

    async def __aenter__(self) -> Any:
        if self.shared:
            return await SHARED_DEPENDENCIES.get().value(self.factory)
        from uncalled_for import Depends as PerCall  # noqa: PLC0415 - see the class

        resolved: Any = PerCall(self.factory)
        return await resolved.__aenter__()

    async def __aexit__(self, *_: object) -> None:
        """Do nothing: the call, or the worker, closes what the factory opened."""


class _Current(DeclaredDependency):
    async def __aenter__(self) -> Context[Any]:
        return CONTEXT.get()


current = cast("Context[Any]", _Current(Context, shared=False))
"""The context of the task, as the default of a parameter of a dependency.

>>> @asynccontextmanager
... async def session(context: Context = current) -> AsyncIterator[Session]: ...
"""


@overload
def Depends(factory: Callable[..., AbstractAsyncContextManager[T]], /) -> T: ...
@overload
def Depends(factory: Callable[..., AbstractContextManager[T]], /) -> T: ...
@overload
def Depends(factory: Callable[..., Awaitable[T]], /) -> T: ...
@overload
def Depends(factory: Callable[..., T], /) -> T: ...
def Depends(factory: Factory, /) -> Any:  # noqa: N802 - it is written like a class, as in other libraries
    """Declare a parameter of a handler, or of another dependency, that the worker opens for each call.

    ``factory`` is a function that returns the value, a coroutine function, or a context manager (async or not), which
    is closed after the handler, and before the task is acked: if that fails, the attempt fails. Within one call, a
    factory is called once. The parameter is no argument of the task. Raises `ConfigurationError` if ``factory`` is no
    function.

    >>> @asynccontextmanager
    ... async def session(pool: Pool = Shared(open_pool)) -> AsyncIterator[Session]:
    ...     async with pool.session() as session, session.begin():
    ...         yield session
    >>> @tasks.task
    ... async def pay(order: int, db: Session = Depends(session)) -> None: ...
    """
    return DeclaredDependency(_checked("Depends", factory), shared=False)


@overload
def Shared(factory: Callable[..., AbstractAsyncContextManager[T]], /) -> T: ...
@overload
def Shared(factory: Callable[..., AbstractContextManager[T]], /) -> T: ...
@overload
def Shared(factory: Callable[..., Awaitable[T]], /) -> T: ...
@overload
def Shared(factory: Callable[..., T], /) -> T: ...
def Shared(factory: Factory, /) -> Any:  # noqa: N802 - as `Depends`
    """Declare a parameter that the worker opens with the first call that needs it, and closes when it ends.

    ``factory`` is as in `Depends`; its own dependencies must be shared, too.

    >>> async def usage(pool: Pool = Shared(open_pool)) -> int: ...
    """
    return DeclaredDependency(_checked("Shared", factory), shared=True)


def _checked(word: str, factory: Any) -> Factory:
    opened = isinstance(factory, AbstractAsyncContextManager | AbstractContextManager)
    if opened or not callable(factory):
        raise ConfigurationError(
            f"{word}: got a {type(factory).__name__}; expected a function, as in {word}(session), without a call of it"
        )
    inner = inspect.unwrap(factory)
    if inner is factory and (
        inspect.isgeneratorfunction(factory) or inspect.isasyncgenfunction(factory)
    ):
        raise ConfigurationError(
            f"{word}: {_name(factory)} is a generator; decorate it with contextlib.asynccontextmanager, or with "
            "contextlib.contextmanager if it is not async"
        )
    return cast("Factory", factory)


def dependencies_of(
    function: Factory, signature: inspect.Signature, *, batch: bool = False
) -> frozenset[str]:
    """Return the names of the parameters of a handler that are dependencies, after a check of all that they need.

    Raises `ConfigurationError` for a dependency of another library, one that cannot be called, and a cycle.
    """
    found = _declared(function, signature)
    for each in found.values():
        _check(each, (function,), shared=False, batch=batch)
    return frozenset(found)


def _declared(function: Factory, signature: inspect.Signature) -> dict[str, DeclaredDependency]:
    found = {}
    for name, parameter in signature.parameters.items():
        default = parameter.default
        if isinstance(default, DeclaredDependency):
            found[name] = default
            continue
        metadata = (
            get_args(parameter.annotation)[1:]
            if get_origin(parameter.annotation) is Annotated
            else ()
        )
        for each in (default, *metadata):
            kind = each if isinstance(each, type) else type(each)
            if kind.__name__.strip("_") in _OTHERS or isinstance(each, DeclaredDependency):
                raise ConfigurationError(
                    f"parameter {name!r} of {_name(function)} has the {kind.__name__.strip('_')} of "
                    f"{kind.__module__.partition('.')[0]}, or has it in Annotated: write 'from taskqueue_core import "
                    f"Depends', and '{name}: ... = Depends(...)'"
                )
    return found


def _check(
    each: DeclaredDependency, path: tuple[Factory, ...], *, shared: bool, batch: bool
) -> None:
    factory, user = each.factory, _name(path[-1])
    if factory in path:
        names = " -> ".join(_name(step) for step in (*path[path.index(factory) :], factory))
        raise ConfigurationError(f"the dependencies {names} are a cycle: remove one of them")
    if shared and not each.shared:
        raise ConfigurationError(
            f"{user} is shared by all calls, but needs {_name(factory)}, which ends with each call: use Shared(...)"
        )
    if isinstance(each, _Current):
        if batch:
            raise ConfigurationError(
                f"{user} needs the context of one task, but {_name(path[0])} handles batches: give the handler a "
                "parameter annotated list[Context]"
            )
        return
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # a class of an extension module
        return
    inner = _declared(factory, signature)
    for name, parameter in signature.parameters.items():
        if name in inner:
            _check(inner[name], (*path, factory), shared=each.shared, batch=batch)
        elif parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            raise ConfigurationError(
                f"the dependency {_name(factory)} of {user} cannot be called: its parameter {name!r} needs a default, "
                "such as Depends(...), or current for the context"
            )


def depends_on(function: Factory, factory: object) -> bool:
    """Return whether a handler, or one of its dependencies, has a dependency that ``factory`` opens."""
    return any(
        each.factory == factory or depends_on(each.factory, factory)
        for each in _needed_by(function).values()
    )


def _needed_by(function: Factory) -> dict[str, DeclaredDependency]:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a class of an extension module
        return {}
    return _declared(function, signature)


class SharedDependencies:
    """The shared dependencies that the calls of one worker have opened. They belong to one event loop."""

    def __init__(self) -> None:
        """Create an object without values."""
        from uncalled_for import Dependency  # noqa: PLC0415 - see `DeclaredDependency`

        Dependency.register(DeclaredDependency)
        self._values: dict[Factory, Any] = {}
        self._locks: dict[Factory, asyncio.Lock] = {}
        self.opened: list[tuple[str, AbstractAsyncContextManager[Any]]] = []
        """names and context managers of those that must be closed, in the order in which they were opened"""

    async def value(self, factory: Factory) -> Any:
        """Return the value of a dependency, and open it if no call has. Raises what opening raises."""
        if factory in self._values:
            return self._values[factory]
        async with self._locks.setdefault(factory, asyncio.Lock()):
            if factory not in self._values:
                self._values[factory] = await self._open(factory)
        return self._values[factory]

    async def _open(self, factory: Factory) -> Any:
        needed = _needed_by(factory)
        arguments = {name: await self.value(each.factory) for name, each in needed.items()}
        value = factory(**arguments)
        if isinstance(value, AbstractContextManager) and not isinstance(
            value, AbstractAsyncContextManager
        ):
            value = _Async(value)
        if isinstance(value, AbstractAsyncContextManager):
            entered = await value.__aenter__()
            self.opened.append((_name(factory), value))
            return entered
        return await value if inspect.isawaitable(value) else value


class _Async(AbstractAsyncContextManager[Any]):
    """A context manager that is not async, as one that is."""

    def __init__(self, inner: AbstractContextManager[Any]) -> None:
        self._inner = inner

    async def __aenter__(self) -> Any:
        return self._inner.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return self._inner.__exit__(kind, error, trace)


SHARED_DEPENDENCIES: ContextVar[SharedDependencies] = ContextVar("taskqueue_shared")
"""the shared dependencies of the worker that runs the handler"""


async def call_with_dependencies(
    function: Factory, call: Callable[[dict[str, Any]], Awaitable[T]]
) -> T:
    """Open the dependencies of a function, await ``call`` with them, close them, and return the result.

    `SHARED_DEPENDENCIES` must be set. Raises what opening, the call or closing raises; a dependency cannot suppress an
    exception of the call.
    """
    from uncalled_for import FailedDependency, resolved_dependencies  # noqa: PLC0415 - see `DeclaredDependency`

    failure: BaseException | None = None
    result: T
    try:
        async with resolved_dependencies(function) as resolved:
            for value in resolved.values():
                if isinstance(value, FailedDependency):
                    raise value.error
            try:
                result = await call(resolved)
            except BaseException as error:
                failure = error
                raise
        if failure is not None:
            raise failure
        return result
    finally:
        del failure  # the exception refers to this frame


@contextmanager
def override(dependency: Callable[..., Any], fake: object) -> Iterator[None]:
    """Replace a dependency in this process, until the end of the block: for tests.

    ``fake`` is a function or a class, which is called instead of ``dependency``, or else the value itself. Raises
    `ConfigurationError` if it cannot be called, or needs what it replaces.

    >>> with override(session, FakeSession()):
    ...     await queue.drain()
    """
    factory = _checked("override", dependency)
    is_factory = inspect.isroutine(fake) or isinstance(fake, type | functools.partial)
    before = dict(_overrides)
    _overrides[factory] = _checked("override", fake) if is_factory else lambda: fake
    try:
        _check(DeclaredDependency(factory, shared=False), (override,), shared=False, batch=False)
        yield
    finally:
        _overrides.clear()
        _overrides.update(before)


def _name(factory: Factory) -> str:
    return getattr(factory, "__qualname__", type(factory).__qualname__)

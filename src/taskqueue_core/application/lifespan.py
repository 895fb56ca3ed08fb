"""Lifespans of registries: what a worker opens before its first task, and closes after its last one."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeAlias

from taskqueue_core.errors import ConfigurationError

LifespanFunction: TypeAlias = Callable[[], AsyncIterator[Any] | AbstractAsyncContextManager[Any]]
"""a function that opens something, yields once, and closes it"""


def checked_lifespan(
    function: Any,
) -> Callable[[], AbstractAsyncContextManager[Any]]:
    """Return the context manager that a lifespan function makes. Raises `ConfigurationError`."""
    if not inspect.isasyncgenfunction(inspect.unwrap(function)):
        raise ConfigurationError(
            f"lifespan: got a {type(function).__name__}; expected an async function with one yield, as in "
            "'@tasks.lifespan' above 'async def lifespan(): ...; yield state; ...'"
        )
    if parameters := inspect.signature(function).parameters:
        raise ConfigurationError(
            f"a lifespan takes no parameters, but {function.__name__} has {', '.join(parameters)}: "
            "read settings inside it"
        )
    # A function that is decorated with asynccontextmanager is no generator function itself.
    return asynccontextmanager(function) if inspect.isasyncgenfunction(function) else function

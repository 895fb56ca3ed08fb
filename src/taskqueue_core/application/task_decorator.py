"""The types of the decorator that declares a task."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from taskqueue_core.application.context import Context
from taskqueue_core.application.task_function import TaskFunction

P = ParamSpec("P")
R = TypeVar("R")


class TaskDecorator(Protocol):
    """What `Tasks.task` returns if it is called with a name or with options: a decorator."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[Context[Any], P], Coroutine[Any, Any, R]], /
    ) -> TaskFunction[P, R, Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> TaskFunction[P, R, Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[Context[Any], P], R], /
    ) -> TaskFunction[P, R, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> TaskFunction[P, R, R]: ...

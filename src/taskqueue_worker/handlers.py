"""The registry of a worker's handlers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from math import isfinite
from typing import Any

import msgspec

from taskqueue_core.errors import ConfigurationError, InvalidInput
from taskqueue_core.limits import LIMITS, check_name
from taskqueue_worker.arguments import Arguments, BatchArguments


class Handler(msgspec.Struct, frozen=True):
    """A function that handles tasks, and its options."""

    key: str
    function: Callable[..., Any]
    arguments: Arguments | BatchArguments
    is_async: bool
    timeout: float | None
    batch: int
    """maximum number of tasks in one call; 0 if each call handles a single task"""


class Handlers:
    """The registered handlers of a worker."""

    def __init__(self) -> None:
        self.by_key: dict[str, Handler] = {}
        """the handler of each key, in the order of registration"""

    @property
    def batches(self) -> tuple[Handler, ...]:
        """The handlers that handle several tasks in one call."""
        return tuple(handler for handler in self.by_key.values() if handler.batch)

    def add(
        self,
        key: str,
        function: Callable[..., Any],
        timeout: float | None = None,
        batch: int | None = None,
    ) -> None:
        """Register ``function`` as the handler of ``key``; with ``batch``, for up to ``batch`` tasks per call.

        Raises `ConfigurationError` if the key is invalid or already has a handler, or if the timeout, the batch size
        or the signature is invalid.
        """
        try:
            check_name("key", key)
        except InvalidInput as error:
            raise ConfigurationError(f"invalid task key: {error}") from error
        if key in self.by_key:
            raise ConfigurationError(f"the key {key!r} already has a handler")
        if len(self.by_key) >= LIMITS.keys:
            raise ConfigurationError(f"a worker can have at most {LIMITS.keys} keys")
        if timeout is not None and not (isfinite(timeout) and timeout > 0):
            raise ConfigurationError("timeout must be a positive number of seconds")
        if batch is not None and not 1 <= batch <= LIMITS.batch:
            raise ConfigurationError(f"batch must be a whole number from 1 to {LIMITS.batch}")
        inner = function
        while isinstance(inner, partial):
            inner = inner.func
        call = inner if inspect.isroutine(inner) else getattr(inner, "__call__", inner)  # noqa: B004 - not a check that the object is callable
        if inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call):
            raise ConfigurationError(
                f"the handler of {key!r} is a generator: use a function without yield"
            )
        arguments = BatchArguments(function) if batch else Arguments(function)
        is_async = inspect.iscoroutinefunction(call)
        self.by_key[key] = Handler(key, function, arguments, is_async, timeout, batch or 0)

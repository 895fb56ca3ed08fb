"""What a handler may raise or return to say how its attempt ended, and rules that say it for other exceptions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any, TypeAlias

from taskqueue_core.application.context import Context
from taskqueue_core.errors import ConfigurationError, InvalidInput
from taskqueue_core.limits import duration

_MAX_DELAY_SECONDS = 365 * 86_400


class Retry(Exception):
    """A request for another attempt, after ``delay`` seconds or as the queue's retry policy says. Raise or return it.

    The attempt counts towards the maximum number of attempts, but not as a failure for the worker's quarantine.
    Raises `InvalidInput` for a delay that is no number from 0 to 31536000 seconds (a year).

    >>> @tasks.task
    ... async def fetch(url: str) -> str:
    ...     raise Retry(30, "the other side is busy")
    """

    def __init__(
        self, delay: float | timedelta | None = None, error: str = "retry requested"
    ) -> None:
        super().__init__(error)
        self.delay = None if delay is None else _delay(delay)
        self.error = error


class Reject(Exception):
    """A request to make the task a dead letter, because no further attempt can succeed. Raise or return it.

    ``reason`` is a short code, and ``error`` an optional text; both are stored with the dead letter.

    >>> @tasks.task
    ... async def fetch(url: str) -> str:
    ...     raise Reject("bad_address", f"no such host: {url}")
    """

    def __init__(self, reason: str, error: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.error = error


class Snooze(Exception):
    """A request to run the task again after ``delay`` seconds, which counts no attempt. Raise or return it.

    It is neither a failure nor a loss: `Context.attempt` grows, `Context.failures` does not. The task's deadline ends
    it, and so does the maximum of 50000 attempts. Raises `InvalidInput` for a delay that is no number from 0 to
    31536000 seconds (a year).

    >>> @tasks.task
    ... async def fetch(url: str) -> str:
    ...     raise Snooze(60)  # the page is not ready yet
    """

    def __init__(self, delay: float | timedelta) -> None:
        self.delay = _delay(delay)
        super().__init__(f"run again in {self.delay:g} s")


Rule = Retry | Reject | Snooze
ErrorRules: TypeAlias = (
    "Mapping[type[Exception], Rule | Callable[[Any, Context[Any]], Rule | None]]"
)
"""by class of exception, how an attempt ends that raised one, or a function of the exception and the context

The most specific class decides. A function that returns ``None`` leaves the exception to the retry policy.
"""
NO_RULES: ErrorRules = MappingProxyType({})
_ARGUMENTS = 2


def checked_rules(rules: object) -> ErrorRules:
    """Return a copy of the rules of a task. Raises `ConfigurationError`, which says what is wrong with which rule."""
    if not isinstance(rules, Mapping):
        raise ConfigurationError(
            f"on_error: got a {type(rules).__name__}; expected a dict of rules by class of exception"
        )
    for kind, rule in rules.items():
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise ConfigurationError(f"on_error: {kind!r} is not a class of exceptions")
        if issubclass(kind, Rule):
            raise ConfigurationError(
                f"on_error: a handler that raises {kind.__name__} needs no rule: remove it"
            )
        _check_rule(kind.__name__, rule)
    return MappingProxyType(dict(rules))


def _check_rule(name: str, rule: object) -> None:
    if isinstance(rule, Rule):
        return
    if isinstance(rule, type) and issubclass(rule, Rule):
        raise ConfigurationError(
            f"on_error: the rule for {name} is the class {rule.__name__}; write an instance, such as Retry(5)"
        )
    if not callable(rule):
        raise ConfigurationError(
            f"on_error: the rule for {name} is a {type(rule).__name__}; expected Retry(), Reject(...), Snooze(...), "
            "or a function of the exception and the context"
        )
    if inspect.iscoroutinefunction(rule):
        raise ConfigurationError(f"on_error: the rule for {name} must not be async")
    try:
        inspect.signature(rule).bind(*[None] * _ARGUMENTS)
    except TypeError:
        raise ConfigurationError(
            f"on_error: the rule for {name} must be a function of two arguments: the exception and the context"
        ) from None
    except ValueError:
        pass  # a built-in function has no signature


def rule_for(rules: ErrorRules, error: Exception, context: Context[Any]) -> Rule | None:
    """Return the rule for an exception; ``None`` if there is none. Raises what the function of a rule raises."""
    found = next((rules[kind] for kind in type(error).__mro__ if kind in rules), None)
    if found is None or isinstance(found, Rule):
        return found
    rule = found(error, context)
    if rule is None or isinstance(rule, Rule):
        return rule
    raise TypeError(
        f"a rule of on_error returned a {type(rule).__name__}; expected Retry, Reject, Snooze or None"
    )


def _delay(delay: float | timedelta) -> float:
    seconds = duration("delay", delay)
    if seconds > _MAX_DELAY_SECONDS:
        raise InvalidInput("delay", "a number out of range", "0 to 31536000 seconds (a year)")
    return seconds

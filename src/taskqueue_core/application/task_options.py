"""The options of a declared task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

import msgspec

from taskqueue_core.application.rules import NO_RULES, ErrorRules, checked_rules
from taskqueue_core.errors import ConfigurationError, InvalidInput
from taskqueue_core.limits import LIMITS, check_number, check_tags, kind_of
from taskqueue_core.uniqueness import Unique


class TaskOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the options of a declared task say."""

    policies: Mapping[str, Any] = {}
    """the settings of its queue that the task declares"""
    batch: int = 0
    """maximum number of tasks in one call of the function; 0: one call for each task"""
    on_error: ErrorRules = NO_RULES
    """what exceptions of the function mean"""
    run: Literal["auto", "thread", "process"] = "auto"
    """where the function is called: in a thread or the event loop, always in a thread, or in a child process"""
    unique: Unique | None = None
    """what makes two publishes the same work"""
    tags: tuple[str, ...] = ()
    """tags of all its tasks"""

    @classmethod
    def of(
        cls,
        policies: Mapping[str, Any],
        batch: int | None,
        on_error: ErrorRules | None = None,
        run: Literal["auto", "thread", "process"] = "auto",
        *,
        unique: Unique | None = None,
        tags: tuple[str, ...] = (),
    ) -> Self:
        """Check options, and return them. Raises `ConfigurationError`."""
        try:
            if batch is not None:
                check_number("batch", batch, 1, LIMITS.batch)
            check_tags("tags", tags)
        except InvalidInput as error:
            raise ConfigurationError(str(error)) from None
        if run not in {"auto", "thread", "process"}:
            raise ConfigurationError(
                f"run: got {str(run)[:50]!r}; expected 'auto', 'thread' or 'process'"
            )
        if run == "process" and batch is not None:
            raise ConfigurationError(
                "a child process runs one task at a time: remove batch, or run='process'"
            )
        if unique is not None and not isinstance(unique, Unique):
            raise ConfigurationError(
                f"unique: got {kind_of(unique)}; expected a Unique, as in unique=Unique(by=('user',))"
            )
        rules = NO_RULES if on_error is None else checked_rules(on_error)
        return cls(
            policies=policies, batch=batch or 0, on_error=rules, run=run, unique=unique, tags=tags
        )

"""The selection of tests: each test declares what it needs, and each class declares what its backend supports."""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import StrEnum
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from taskqueue_core.backend import Capabilities, Capability

Need = (
    Literal[
        "atomic_retry",
        "durable",
        "manual_clock",
        "shared",
        "failing",
        "opener",
        "stored",
        "unanswered",
    ]
    | Capability
)

Test = TypeVar("Test", bound=Callable[..., Any])

_FLAGS = ("atomic_retry", "durable", "shared")
_METHODS = ("failing", "opener", "stored", "unanswered")
"""optional methods of a test class; a test that calls one of them applies only to classes that define the method"""
_OTHERS = (*_FLAGS, "manual_clock", *_METHODS)
_NEEDS = "__taskqueue_needs__"


class Declaring(Protocol):
    """A test class that declares what its backend supports: see `taskqueue_conformance.Harness`."""

    manual_clock: ClassVar[bool]
    capabilities: ClassVar[Capabilities]


def needs(*what: Need) -> Callable[[Test], Test]:
    """Declare what a test needs. The test is collected only in classes that declare support for all these needs."""

    def declare(test: Test) -> Test:
        add_needs(test, what)
        return test

    return declare


def add_needs(test: Callable[..., Any], what: Collection[Need]) -> None:
    """Put needs in front of the needs that a test already has. Raises `ValueError` for an unknown need."""
    for need in what:
        if not isinstance(need, StrEnum) and need not in _OTHERS:
            raise ValueError(f"unknown need: {need!r}. Use a Capability, or one of {_OTHERS}")
    vars(test)[_NEEDS] = tuple(dict.fromkeys([*what, *needs_of(test)]))


def needs_of(test: object) -> tuple[Need, ...]:
    """Return what a test needs; an empty tuple if it needs nothing."""
    matches: tuple[Need, ...] = getattr(test, _NEEDS, ())
    return matches


def missing(harness: type[Declaring], test: object) -> Need | None:
    """Return the first need of a test that ``harness`` does not declare, or ``None`` if the test applies."""
    return next((need for need in needs_of(test) if not _declares(harness, need)), None)


def _declares(harness: type[Declaring], need: Need) -> bool:
    if need == "manual_clock":
        return harness.manual_clock
    if need in _METHODS:
        return _defines(harness, need)
    if need in _FLAGS:
        return bool(getattr(harness.capabilities, need))
    return need in harness.capabilities.names


def _defines(harness: type[Declaring], method: str) -> bool:
    """Return whether the test class overrides ``method``, an optional method of `taskqueue_conformance.Harness`."""
    first = next(base for base in harness.__mro__ if method in vars(base))
    return first.__module__ != "taskqueue_conformance.harness"

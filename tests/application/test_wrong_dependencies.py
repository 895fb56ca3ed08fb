"""Dependencies that are refused when the module of tasks is imported."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import pytest

from taskqueue_core import Context, Depends, Shared, Tasks, current
from taskqueue_core.errors import ConfigurationError


@asynccontextmanager
async def pool() -> AsyncIterator[int]:
    """A context manager."""
    yield 1


async def session(context: Context[Any] = current) -> str:
    """A dependency that needs the context of one task."""
    return context.task_id


def generator() -> Iterator[int]:
    """Lack a decorator."""
    yield 1


def required(url: str) -> str:
    """Need an argument that nothing provides."""
    return url


def chained(db: str = Depends(required)) -> str:
    """Need a dependency that cannot be called."""
    return db


@asynccontextmanager
async def mixed(db: str = Depends(session)) -> AsyncIterator[str]:
    """Outlive what it needs."""
    yield db


def one(_: Any = None) -> None:
    """Part of a cycle."""


def two(_: Any = Depends(one)) -> None:
    """Part of a cycle."""


one.__defaults__ = (Depends(two),)
Foreign = type("Depends", (), {"__module__": "fastapi.params", "__init__": lambda *_: None})


def _task(default: Any, **options: Any) -> None:
    def run(text: list[str], db: str = default) -> None: ...

    Tasks().task("run", **options)(run)


def _annotated() -> None:
    async def run(db: Annotated[str, Depends(session)]) -> None: ...

    run.__annotations__["db"] = Annotated[str, Depends(session)]
    Tasks().task(run)


@pytest.mark.parametrize(
    ("declare", "fault"),
    [
        (
            lambda: Depends(3),  # type: ignore[call-overload]
            "Depends: got a int; expected a function, as in Depends",
        ),
        (
            lambda: Shared(pool()),
            r"Shared: got a _AsyncGeneratorContextManager.*without a call of it",
        ),
        (lambda: Depends(generator), "generator is a generator; decorate it with contextlib"),
        (lambda: _task(Depends(required)), "dependency required of .*run cannot be called.*'url'"),
        (lambda: _task(Depends(chained)), "dependency required of chained cannot be called"),
        (lambda: _task(Depends(one)), "dependencies one -> two -> one are a cycle"),
        (lambda: _task(Foreign()), "'db' of .*run has the Depends of fastapi.*from taskqueue_core"),
        (_annotated, "or has it in Annotated: write.*'db: ... = Depends"),
        (lambda: _task(Shared(mixed)), r"mixed is shared.*needs session.*use Shared\(...\)"),
        (lambda: _task(Depends(session), batch=2), r"session needs the context of one task"),
    ],
)
def test_what_is_refused_at_import(declare: Callable[[], object], fault: str) -> None:
    """U9: a dependency that could never work is refused at import, with the form to write."""
    with pytest.raises(ConfigurationError, match=fault):
        declare()

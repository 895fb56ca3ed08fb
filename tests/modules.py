"""Packages that tests write into a folder and import."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def own_package(name: str) -> Iterator[None]:
    """Let a test import its own package: forget that of another test before it, and this one after it."""
    _forget(name)
    try:
        yield
    finally:
        _forget(name)


def _forget(package: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]

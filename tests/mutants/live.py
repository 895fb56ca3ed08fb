"""Replacing the code of functions in memory, which is much faster than importing the modules again."""

from __future__ import annotations

import ast
import gc
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import _lru_cache_wrapper
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

_Key = tuple[str, str, int]
"""file name, qualified name and first line of a function"""


class Loaded:
    """All functions and caches, loaded from the sources in a folder, that exist when this object is created."""

    def __init__(self, folder: Path) -> None:
        inside = f"{folder}/"
        self._functions: dict[_Key, list[FunctionType]] = defaultdict(list)
        self._caches: list[_lru_cache_wrapper[Any]] = []
        for found in gc.get_objects():
            if (
                type(found) is FunctionType
            ):  # isinstance would raise for a weak proxy whose object no longer exists
                if found.__code__.co_filename.startswith(inside):
                    self._functions[_key(found.__code__)].append(found)
            elif type(found) is _lru_cache_wrapper:
                code = getattr(found.__wrapped__, "__code__", None)
                if code is not None and code.co_filename.startswith(inside):
                    self._caches.append(found)

    def forget(self) -> None:
        """Clear every ``functools.cache``."""
        for cache in self._caches:
            cache.cache_clear()

    def replace(self, path: Path, tree: ast.Module) -> bool:
        """Give the functions of a file the code of a changed source. Return False if that cannot be done in memory."""
        codes = list(_inner(compile(tree, str(path), "exec", dont_inherit=True)))
        often = Counter(_key(code) for code in codes)
        changed = [
            (function, code)
            for code in codes
            for function in self._functions.get(_key(code), ())
            if function.__code__ != code
        ]
        if not changed or any(often[_key(code)] > 1 for _, code in changed):
            return False
        if any(
            len(code.co_freevars) != len(function.__code__.co_freevars)
            for function, code in changed
        ):
            return False
        for function, code in changed:
            function.__code__ = code
        return True


def _key(code: CodeType) -> _Key:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _inner(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _inner(constant)

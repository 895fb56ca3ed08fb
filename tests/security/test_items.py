"""The security list is complete, and the tests that it names exist."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.security.items import ITEMS, LATER

TESTS = Path(__file__).parents[1]


@cache
def parsed(path: str) -> list[ast.stmt]:
    """Return the statements of a test file."""
    return ast.parse((TESTS / path).read_text(encoding="utf-8")).body


def test_every_item_has_its_tests_or_a_reason() -> None:
    """Each of the 28 items is in exactly one of the two tables."""
    assert ITEMS.keys().isdisjoint(LATER)
    assert sorted([*ITEMS, *LATER]) == list(range(1, 29))
    assert all(tests for _, tests in ITEMS.values())


@pytest.mark.parametrize("number", ITEMS)
def test_its_tests_are_there(number: int) -> None:
    """Each test in the list exists, with its file, class and function; a star means the whole file."""
    for test in ITEMS[number][1]:
        path, _, name = test.partition("::")
        nodes = parsed(path)
        for part in () if name == "*" else name.split("."):
            found = [node for node in nodes if getattr(node, "name", None) == part]
            assert found, f"{test}: there is no {part}"
            nodes = getattr(found[0], "body", [])

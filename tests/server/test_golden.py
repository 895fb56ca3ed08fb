"""What clients are generated from stays as it is, unless it is changed on purpose."""

from __future__ import annotations

import json

import pytest

from tests.server.golden import FOLDER, described


@pytest.mark.parametrize("name", ["openapi.json", "asyncapi.json"])
def test_descriptions_are_as_agreed(name: str) -> None:
    """E1: no rename of a class, function or module changes what clients see."""
    agreed = json.loads((FOLDER / name).read_text("utf-8"))
    assert described()[name] == agreed, "if this is meant: python -m tests.server.golden"


def test_every_operation_has_a_name_of_its_own() -> None:
    """E1: generated clients name their functions after it."""
    paths = described()["openapi.json"]["paths"]
    names = [operation["operationId"] for path in paths.values() for operation in path.values()]
    assert all(names)
    assert len({*names}) == len(names)

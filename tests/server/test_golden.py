"""The API descriptions from which clients are generated change only on purpose."""

from __future__ import annotations

import json

import pytest

from tests.server.golden import FOLDER, described


@pytest.mark.parametrize("name", ["openapi.json", "asyncapi.json"])
def test_descriptions_are_as_agreed(name: str) -> None:
    """E1: the served descriptions are equal to the agreed files, so that a rename in the code does not change them."""
    agreed = json.loads((FOLDER / name).read_text("utf-8"))
    assert described()[name] == agreed, (
        "if the change is intended, run python -m tests.server.golden"
    )


def test_every_operation_has_a_name_of_its_own() -> None:
    """E1: every operation has a unique id, because generated clients name their functions after it."""
    paths = described()["openapi.json"]["paths"]
    names = [operation["operationId"] for path in paths.values() for operation in path.values()]
    assert all(names)
    assert len({*names}) == len(names)

"""Tests of the order of test files and their distribution to processes."""

import pytest

from tests import areas


class Named(pytest.Item):
    """A pytest item of which only the node id matters."""

    def runtest(self) -> None:
        """Do nothing."""


def test_the_longest_areas_come_first(request: pytest.FixtureRequest) -> None:
    """Tests of the slowest areas run first, all others keep their order, and no test is lost."""
    names = [
        "tests/a/test_x.py::t",
        "tests/prefect/test_b.py::t",
        "tests/spark/test_a.py::t",
        "tests/z.py::t",
    ]
    items: list[pytest.Item] = [
        Named.from_parent(request.session, name="t", nodeid=name) for name in names
    ]
    areas.pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == [names[2], names[1], names[0], names[3]]
    for folder in areas.FIRST:
        assert (request.config.rootpath / folder).is_dir()


def test_a_process_gets_whole_files() -> None:
    """All tests of a file run in the same process, and so do all tests that share a Spark session."""
    assert areas.group("tests/core/test_a.py::T::x[a/b::c]") == "tests/core/test_a.py"
    assert areas.group("tests/spark/test_a.py::x") == areas.group("tests/spark/test_b.py::y")

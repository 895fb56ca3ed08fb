"""Tests of the order of the tests, and of the time report that closes a run."""

import pytest

from tests import areas


class Named(pytest.Item):
    """A test of which only the name counts."""

    def runtest(self) -> None:
        """Prove nothing."""


def report(nodeid: str, seconds: float) -> pytest.TestReport:
    """What pytest reports of one phase of one test."""
    return pytest.TestReport(
        nodeid, ("", 0, ""), {}, "passed", None, "call", duration=seconds, start=0, stop=seconds
    )


def test_every_phase_counts_for_its_folder() -> None:
    """Phases are added up by the top-level folder; tests elsewhere are left out."""
    reports = [
        report("tests/core/test_a.py::test_x", 1.0),
        report("tests/core/deep/test_b.py::test_y[a/b::c]", 0.5),
        report("tests/dev/test_c.py::test_z", 0.25),
        report("elsewhere/test_d.py::test_z", 9.0),
    ]
    assert areas.seconds_by_area(reports) == {"core": 1.5, "dev": 0.25}


def test_areas_share_their_budget() -> None:
    """Areas of one budget stand in one line; an overrun is loud; others have no budget."""
    shown = list(areas.lines({"core": 100.0, "memory": 60.5, "server": 3.0, "tools": 1.0}))
    assert [(" ".join(line.split()), over) for line, over in shown] == [
        ("core + memory 160.5 s of 150 s OVER by 10.5 s", True),
        ("server 3.0 s of 300 s", False),
        ("tools 1.0 s", False),
    ]


def test_the_longest_areas_come_first(request: pytest.FixtureRequest) -> None:
    """Tests of the longest areas are put before all others, which stay in their order; none is lost."""
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
    """Tests of one file run in one process, and so do all tests that share a Spark session."""
    assert areas.group("tests/core/test_a.py::T::x[a/b::c]") == "tests/core/test_a.py"
    assert areas.group("tests/spark/test_a.py::x") == areas.group("tests/spark/test_b.py::y")

"""Tests of the time budgets of test areas and of the table at the end of a test run."""

from pathlib import Path

import pytest

from tests import budgets

pytest_plugins = ["pytester"]


def report(nodeid: str, seconds: float) -> pytest.TestReport:
    """Return the report of pytest about one phase of a test."""
    return pytest.TestReport(
        nodeid, ("", 0, ""), {}, "passed", None, "call", duration=seconds, start=0, stop=seconds
    )


def test_every_phase_counts_for_its_folder() -> None:
    """The times of all phases are added up for each top-level folder of tests; other folders are left out."""
    reports = [
        report("tests/core/test_a.py::test_x", 1.0),
        report("tests/core/deep/test_b.py::test_y[a/b::c]", 0.5),
        report("tests/dev/test_c.py::test_z", 0.25),
        report("elsewhere/test_d.py::test_z", 9.0),
    ]
    assert budgets.seconds_by_area(reports) == {"core": 1.5, "dev": 0.25}


def test_areas_share_their_budget() -> None:
    """Areas with a common budget share one line, an overrun is marked, and other areas have no budget."""
    shown = list(
        budgets.lines(
            {"core": 100.0, "memory": 60.5, "server": 3.0, "tools": 1.0}, everything=False
        )
    )
    assert [(" ".join(line.split()), over) for line, over in shown] == [
        ("core + memory 160.5 s of 150 s OVER by 10.5 s", True),
        ("server 3.0 s of 160 s", False),
        ("tools 1.0 s", False),
    ]


@pytest.mark.parametrize(("words", "code"), [(["--budgets"], 1), ([], 0)])
def test_an_overrun_fails_a_run_that_checks_budgets(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int
) -> None:
    """An area over its budget fails the test run only if the option is given."""
    monkeypatch.setitem(budgets.BUDGETS, ("some",), (0, 0))
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function")
    folder = pytester.mkdir("tests") / "some"
    folder.mkdir()
    Path(folder, "test_it.py").write_text("def test_it(): pass")
    ended = pytester.inline_run(
        *("-p", "tests.budgets", "-p", "no:cacheprovider", "tests/some"), *words
    )
    assert ended.ret == code

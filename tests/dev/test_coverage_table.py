"""Tests of the table that shows which test proves which capability."""

from pathlib import Path

import pytest

from tools import coverage_table

ROWS = """
current_part = 1

[[row]]
id = "A17"
text = "one | two"
part = 1

[[row]]
id = "fault A1"
text = "a crash"
part = 2

[[row]]
id = "law 5"
text = "limits"
part = 2
applies = false
why = "it is checked elsewhere"
"""
TEST = '"""A17 here is no proof."""\n\n\ndef test_it() -> None:\n    """{}"""\n'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project with several rows and one test, which proves the first of them."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "docs" / "coverage-rows.toml").write_text(ROWS)
    (tmp_path / "tests" / "test_x.py").write_text(TEST.format("It holds (A17)."))
    return tmp_path


def test_the_table_names_the_proof_of_each_row(root: Path) -> None:
    """A row shows its tests, or the part in which they are due, or the reason why it needs none."""
    assert coverage_table.main([], root) == 0
    assert (root / "docs" / "coverage.md").read_text().splitlines()[-3:] == [
        r"| A17 | one \| two | 1 | `tests/test_x.py::test_it` |",
        "| fault A1 | a crash | 2 | part 2 |",
        "| law 5 | limits | 2 | not applicable: it is checked elsewhere |",
    ]
    assert coverage_table.main(["--check"], root) == 0


def test_a_stale_table_is_refused(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If the page is out of date, the check fails without changing the page."""
    assert coverage_table.main(["--check"], root) == 1
    assert "stale" in capsys.readouterr().out
    assert not (root / "docs" / "coverage.md").exists()


@pytest.mark.parametrize(
    ("docstring", "problem"),
    [
        ("No row is named.", "A17 has no test: one | two"),
        ("A17 and A18.", "tests/test_x.py::test_it names A18, which is no row"),
        ("A17, OPEN-A9.", "tests/test_x.py::test_it names OPEN-A9, which is no row"),
        ("A17, fault A2.", "tests/test_x.py::test_it names fault A2, which is no row"),
        ("fault A17.", "A17 has no test: one | two"),
    ],
)
def test_a_gap_is_refused(
    docstring: str, problem: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The check fails if a row that is due has no test, or if a docstring names an unknown row."""
    (root / "tests" / "test_x.py").write_text(TEST.format(docstring))
    assert coverage_table.main([], root) == 1
    assert problem in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("A17, FIX-C3 and GOAL-AB.", ["A17", "FIX-C3", "GOAL-AB"]),
        ("(OPEN-A1); BUG-D1/REV-E1", ["OPEN-A1", "BUG-D1", "REV-E1"]),
        ("law 5", ["law 5"]),
        ("Laws 2, 3 and\n  7 hold, A2.", ["law 2", "law 3", "law 7", "A2"]),
        ("fault A1 and A17's", ["fault A1", "fault A17"]),
        ("A17, faults A1, G9, and K3: all", ["A17", "fault A1", "fault G9", "fault K3"]),
        ("fault K3, law 5", ["fault K3", "law 5"]),
        ("S3, E2E, UTF-A17, A17b, default A1", ["A1"]),
        ("within 5 laws", []),
    ],
)
def test_ids_are_read_from_prose(text: str, ids: list[str]) -> None:
    """Rows are named by their id alone; faults and laws follow the word "fault" or "law", also in lists."""
    assert list(coverage_table.ids_in(text, families=set("ABCDEFG"))) == ids


def test_classes_and_their_tests_are_read(root: Path) -> None:
    """A class of the conformance kit can name rows for all its tests; methods that are not tests prove nothing."""
    kit = root / "src" / "taskqueue_conformance" / "suites"
    kit.mkdir(parents=True)
    (kit / "publish.py").write_text(
        'class Publish:\n    """A1."""\n    async def test_x(self):\n        """A2."""\n'
        '    def helper(self):\n        """A3."""\n'
    )
    found = coverage_table.find_tests(root, {"A"})
    path = "src/taskqueue_conformance/suites/publish.py::Publish"
    assert found == {"A17": ["tests/test_x.py::test_it"], "A1": [path], "A2": [f"{path}::test_x"]}


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("current_part = 1", "", "'current_part' is absent"),
        ('"law 5"', '"A17"', "A17 is there twice"),
        ('"law 5"', '"five"', "five is not an id"),
        ("part = 1\n\n", "part = 18\n\n", "A17: part is not 1 to 17"),
        ("why =", "because =", "because"),
        ('why = "it is checked elsewhere"', "", "law 5: applies = false needs a why"),
        ("[[row]]", "[[row", "Expected"),
    ],
)
def test_bad_rows_are_reported_clearly(
    old: str, new: str, problem: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistake in the rows is reported in one line that names the file and the row."""
    (root / "docs" / "coverage-rows.toml").write_text(ROWS.replace(old, new))
    assert coverage_table.main(["--check"], root) == 1
    said = capsys.readouterr().out
    assert said.startswith("docs/coverage-rows.toml: ")
    assert problem in said
    assert said.count("\n") == 1


def test_absent_rows_are_reported_clearly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the file with the rows is missing, the error names the file."""
    assert coverage_table.main(["--check"], tmp_path) == 1
    assert capsys.readouterr().out == "docs/coverage-rows.toml: the file is absent\n"

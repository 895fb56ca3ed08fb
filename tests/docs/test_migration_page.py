"""The code on the page about migrations runs."""

from pathlib import Path

from tests.docs.programs import blocks, python

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()


def test_its_code(tmp_path: Path) -> None:
    """A20: the code migrates an application from one backend to another and finishes."""
    (code,) = blocks(PAGE, "python")
    assert python(code, tmp_path) == "finished\n"

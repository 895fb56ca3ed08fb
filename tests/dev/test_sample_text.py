"""Tests of the tool that draws a random sample of comments and messages."""

from pathlib import Path

import pytest

from tools import sample_text

SOURCE = '''"""A module with some text."""

LIMIT = 3  # a comment after code
# A comment of
# two whole lines.
# fmt: off
VALUE = 1
"""the docstring of an attribute"""


def work(name: str) -> None:  # noqa: ARG001 - the reason is text too
    """Short."""
    log.warning("the store is %s", name, extra={"a": 1})
    raise ValueError(f"the name {name!r} is not known")
    client.get("this is not a message")
'''


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A source folder with one module."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "module.py").write_text(SOURCE)
    return tmp_path / "src"


def test_blocks_and_calls_are_whole(source: Path) -> None:
    """A block of comment lines is one item, and a message is its whole call; very short texts are left out."""
    notes, calls = sample_text.collect(source)
    assert [(item.line, item.text) for item in sample_text.sample(notes, "x")] == [
        (1, "A module with some text."),
        (3, "a comment after code"),
        (4, "A comment of\ntwo whole lines."),
        (8, "the docstring of an attribute"),
        (11, "the reason is text too"),
    ]
    assert [item.text for item in calls] == [
        "log.warning('the store is %s', name, extra={'a': 1})",
        "ValueError(f'the name {name!r} is not known')",
    ]


def test_a_seed_gives_one_sample(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same seed always draws the same 40 items, and another seed draws others; the list is numbered."""
    lines = [f"# This is the comment number {n} of all.\n\n" for n in range(200)]
    (source / "more.py").write_text("".join(lines))
    outputs = []
    for seed in ("a1", "a1", "b2"):
        assert sample_text.main(["--seed", seed], source) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]
    assert outputs[0].count(". [ ] src/") == 42
    assert "\n40. [ ] src/more.py:" in outputs[0]

"""Tests of the project's own checks."""

import ast
from pathlib import Path

import pytest

from tools import check, check_files, check_lock, check_public_names, check_words, structure

ROOT = Path(__file__).parents[2]
HASH = "    --hash=sha256:" + "0" * 64


def put(root: Path, name: str, text: str) -> None:
    """Write a file, and create its folders."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_failing_check_does_not_hide_another(capsys: pytest.CaptureFixture[str]) -> None:
    """All checks run even if one fails; its output is shown, and the last line names it."""
    assert check.main({"bad": ["sh", "-c", "echo why; exit 1"], "good": ["true"]}) == 1
    lines = capsys.readouterr().out.splitlines()
    assert {" ".join(line.split()[:2]) for line in lines} >= {"bad FAILED", "why", "good ok"}
    assert lines[-1] == "Failed: bad."
    assert check.main({"good": ["true"]}) == 0


def test_a_file_over_the_cap_is_named(tmp_path: Path) -> None:
    """A file with more lines than the limit is reported; a file with exactly the limit is not."""
    put(tmp_path, "src/at_the_cap.py", "\n" * check_files.CAP)
    put(tmp_path, "src/over.lua", "\n" * (check_files.CAP + 1))
    put(tmp_path, "docs/long.md", "\n" * 1000)
    assert list(check_files.too_long(tmp_path)) == ["src/over.lua: 401 lines, 400 are allowed"]


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "import os, marshal as m",
        "from shelve import open",
        "def f():\n    import pickle.x",
        "eval('1')",
        "exec('1')",
        "yaml.load('')",
    ],
)
def test_what_turns_data_into_code_is_found(code: str) -> None:
    """Each forbidden import and call is found anywhere in a file."""
    assert len(list(check_files.forbidden(ast.parse(code)))) == 1


@pytest.mark.parametrize(
    "code", ["from . import pickles", "yaml.safe_load('')", "model.eval()", "'eval(1)'"]
)
def test_what_only_looks_like_it_is_allowed(code: str) -> None:
    """Names that only resemble a forbidden name are allowed."""
    assert list(check_files.forbidden(ast.parse(code))) == []


PARTS = {
    "src/pkg/part.py": "__all__ = ['A', 'B']\nclass A: ...\nclass B: ...\nclass C: ...",
    "src/pkg/plain.py": "class D: ...",
    "src/other/__init__.py": "__all__ = ['X']\nclass X: ...",
    "src/pkg/sub/__init__.py": "from ..part import A\n__all__ = ['A']",
}

_LAZY = "if TYPE_CHECKING:\n    from pkg.part import A\n__all__ = ['A']\n_MODULES = {}"


@pytest.mark.parametrize(
    ("init", "problem"),
    [
        ("from pkg.part import A\nfrom .sub import A as D\n__all__ = ['A', 'D']", ""),
        ("from pkg import part\n__all__ = ['part']\ndef _private(): ...", ""),
        ("import os\nfrom typing import Any\n__version__ = '1'\n__all__ = ['__version__']", ""),
        ("'''Nothing is public.'''", ""),
        ("from pkg.part import A, B\n__all__ = ['A']", "B is offered but not in __all__"),
        ("from .part import C\n__all__ = ['C']", "C is not a public name of pkg.part"),
        ("if TYPE_CHECKING:\n    from .part import A\n__all__ = ['A']", ""),
        ("if TYPE_CHECKING:\n    from other import X\n__all__ = ['X']", ""),
        (_LAZY.format("{'A': 'pkg.part'}"), ""),
        (_LAZY.format("{'A': 'pkg.plain'}"), "A must have one module"),
        (_LAZY.format("{}"), "A must have one module"),
        ("from .plain import D\n__all__ = ['D']", ""),
        ("from .plain import E\n__all__ = ['E']", "E is not a public name of pkg.plain"),
        ("__all__ = ['A']", "A is in __all__ but neither defined nor re-exported"),
        ("def f(): ...", "__all__ is absent, or is not a plain list of strings"),
        ("def f(): ...\n__all__ = list('f')", "__all__ is absent, or is not a plain list"),
    ],
)
def test_public_names_are_a_deliberate_list(init: str, problem: str, tmp_path: Path) -> None:
    """``__all__`` must list exactly the names that a package offers, and each must be public in its own module."""
    for name, text in (PARTS | {"src/pkg/__init__.py": init}).items():
        put(tmp_path, name, text)
    source = tmp_path / "src"
    found = list(check_public_names.problems(source / "pkg" / "__init__.py", source))
    assert [one.startswith(problem) for one in found] == ([True] if problem else [])
    assert list(check_public_names.problems(source / "pkg/sub/__init__.py", source)) == []


def test_words_have_budgets_that_only_fall(tmp_path: Path) -> None:
    """A word is counted in names, comments, strings and pages.

    More or fewer occurrences than its budget fail the check.
    """
    put(tmp_path, "README.md", "It is told anew.")
    put(tmp_path, "src/a.py", "class ToldHub:\n    told_by = 1  # by the hubs, untold\n")
    put(tmp_path, "src/b.py", 'KEY = "hub"\n')
    words = {
        "told": {"use": "response", "budget": 3},
        "hub": {"use": "context", "forms": ["hubs"], "budget": 1},
        "anew": {"use": "again", "budget": 2},
    }
    table: dict[str, object] = {
        "words": words,
        "exceptions": [{"files": ["src/b.py"], "words": ["hub"], "reason": "a Redis key"}],
    }
    wrong, total = check_words.check(tmp_path, table)
    assert total == {"told": 3, "hub": 2, "anew": 1}
    assert [line.split(",")[0] for line in wrong] == [
        "'hub' occurs 2 times",
        "'anew' occurs 1 times",
    ]
    put(tmp_path, "tools/words.toml", '[words]\nanew = { use = "again", budget = 2 }\n')
    check_words.lower(tmp_path / "tools/words.toml", total)
    assert "budget = 1 }" in (tmp_path / "tools/words.toml").read_text()


def test_circles_are_found() -> None:
    """Modules that import one another, directly or through other modules, form one group."""
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"f"}, "f": {"e"}}
    assert sorted(structure.circles(edges)) == [["a", "b", "c"], ["e", "f"]]


def test_the_lock_is_pure_and_fits() -> None:
    """The committed lock file contains only pins with hashes, and each dependency is within its bounds."""
    assert check_lock.main(ROOT) == 0
    assert "://" not in (ROOT / "requirements.lock").read_text()


@pytest.mark.parametrize(
    "line",
    [
        "--index-url https://example.org/simple",
        "-i https://example.org/simple",
        "--find-links /wheels",
        "# made by a tool with --output-file /somewhere/requirements.lock",
        "-e .",
        "pkg @ https://example.org/pkg.whl \\",
        "pkg @ file:///wheels/pkg.whl \\",
        "pkg==1.0",
        "pkg>=1.0 \\",
    ],
)
def test_an_impure_line_is_found(line: str) -> None:
    """A line of the lock file with a URL, path, option, comment or pin without hash is reported."""
    lock = f"good-name==1.0 ; sys_platform == 'win32' \\\n{HASH} \\\n{HASH}\n{line}\n"
    assert [one.split(":")[1] for one in check_lock.impurities(lock)] == ["4"]


def test_a_lock_that_lags_behind_is_found() -> None:
    """A dependency that is missing from the lock file, or outside its bounds, is reported."""
    project = """
        [project]
        name = "own"
        dependencies = ["fine>=1,<2", "Not_There>=1"]
        [project.optional-dependencies]
        more = ["own[other]", "old>=2"]
        [dependency-groups]
        dev = []
    """
    lock = f"fine==1.5 \\\n{HASH}\nold==1.9 \\\n{HASH}\n"
    found = [one.split()[0] for one in check_lock.misfits(lock, project)]
    assert found == ["Not_There>=1", "old>=2"]

"""Write docs/coverage.md, a table that shows which tests prove which capability.

The rows are in docs/coverage-rows.toml:

    current_part = 1            # tests of later parts may still be absent

    [[row]]
    id = "E3"                   # a row: A17, FIX-C3, OPEN-A1, BUG-D1, REV-E1, GOAL-AB, G1
    text = "..."                # what it is, in one line
    part = 1                    # when its tests are due, 1 to 17

    [[row]]
    id = "fault A1"             # a fault case; a law is "law 5"
    text = "..."
    part = 2
    applies = false             # needs no test ...
    why = "..."                 # ... because

A test proves a row by naming its id in the docstring of the test or of its class. The ids of faults and laws follow
the word, also in a list: "B10, laws 2, 3 and 7, faults A1 and G9". A letter with a number (S3) counts as the id of a
row only if there are rows with this letter.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROWS = Path("docs/coverage-rows.toml")
TABLE = Path("docs/coverage.md")
TESTS = ("tests", "src/taskqueue_conformance")
PARTS = range(1, 18)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

_LIST = r"{0}(?:(?:,\s*|\s+and\s+|,\s+and\s+){0}\b)*"
NAMES = re.compile(
    r"(?<![\w-])(?:"
    rf"(?P<fault>[Ff]aults?\s+{_LIST.format('[A-Z][0-9]+')})"
    rf"|(?P<law>[Ll]aws?\s+{_LIST.format('[0-9]+')})"
    r"|(?P<row>(?:FIX|OPEN|BUG|REV)-[A-Z][0-9]+|GOAL-[A-Z]+|[A-Z][0-9]+)"
    r")(?![\w-])"
)
HEAD = """\
# Coverage

Which test proves which capability. Written by `tools/coverage_table.py`; do not edit.

A test that names a row of a later part proves some of it.

| id | capability | part | tests |
| --- | --- | --- | --- |
"""


class BadRowsError(Exception):
    """The file with the rows is malformed; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One capability, and the part in which its tests are due."""

    id: str
    text: str
    part: int
    applies: bool = True
    why: str = ""


def read_rows(path: Path) -> tuple[int, list[Row]]:
    """Return the current part, and the rows in the order of the file. Raises `BadRowsError` if a row is malformed."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        rows = [Row(**row) for row in table["row"]]
        current = table["current_part"]
    except FileNotFoundError:
        raise BadRowsError("the file is absent") from None
    except KeyError as error:
        raise BadRowsError(f"{error} is absent") from None
    except (TypeError, tomllib.TOMLDecodeError) as error:
        raise BadRowsError(str(error)) from None
    seen: set[str] = set()
    for row in rows:
        if row.id in seen:
            raise BadRowsError(f"{row.id} is there twice")
        if list(ids_in(row.id, families={row.id[:1]})) != [row.id]:
            raise BadRowsError(f"{row.id} is not an id that a docstring can name")
        if row.part not in PARTS:
            raise BadRowsError(f"{row.id}: part is not 1 to 17")
        if not row.applies and not row.why:
            raise BadRowsError(f"{row.id}: applies = false needs a why")
        seen.add(row.id)
    return current, rows


def ids_in(text: str, *, families: set[str]) -> Iterator[str]:
    """Yield the ids in a text. A letter with a number counts as an id only if the letter is in ``families``."""
    for match in NAMES.finditer(text):
        kind = match.lastgroup
        if kind == "row":
            if "-" in match[0] or match[0][0] in families:
                yield match[0]
        else:
            pattern = r"\b[A-Z][0-9]+" if kind == "fault" else r"[0-9]+"
            yield from (f"{kind} {name}" for name in re.findall(pattern, match[0]))


def docstrings(body: list[ast.stmt], inside: str = "") -> Iterator[tuple[str, str]]:
    """Yield the name, in the form ``::name``, and the docstring of each class and each test function."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield f"{inside}::{node.name}", ast.get_docstring(node) or ""
            yield from docstrings(node.body, f"{inside}::{node.name}")
        elif isinstance(node, FUNCTIONS) and node.name.startswith("test"):
            yield f"{inside}::{node.name}", ast.get_docstring(node) or ""


def find_tests(root: Path, families: set[str]) -> dict[str, list[str]]:
    """Return for each id the tests that name it, in the form ``path::name``."""
    found: dict[str, list[str]] = {}
    for folder in TESTS:
        for path in sorted((root / folder).rglob("*.py")):
            for name, text in docstrings(ast.parse(path.read_text(encoding="utf-8")).body):
                test = f"{path.relative_to(root).as_posix()}{name}"
                for row_id in dict.fromkeys(ids_in(text, families=families)):
                    found.setdefault(row_id, []).append(test)
    return found


def render(current: int, rows: list[Row], tests: dict[str, list[str]]) -> str:
    """Return the text of the page. Tests of a row of a later part are shown as an incomplete proof."""
    lines = []
    for row in rows:
        due = [f"part {row.part}"] if row.part > current else []
        proof = "<br>".join([*due, *(f"`{test}`" for test in tests.get(row.id, []))])
        if not row.applies:
            proof = f"not applicable: {row.why}"
        cells = (row.id, row.text, str(row.part), proof)
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |\n")
    return HEAD + "".join(lines)


def gaps(current: int, rows: list[Row], tests: dict[str, list[str]]) -> Iterator[str]:
    """Yield a message for each row whose test is due and missing, and for each id without a row."""
    for row in rows:
        if row.applies and row.part <= current and row.id not in tests:
            yield f"{row.id} has no test: {row.text}"
    for unknown in sorted(set(tests) - {row.id for row in rows}):
        yield f"{tests[unknown][0]} names {unknown}, which is no row of {ROWS}"


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Write the page, or with --check only compare it; return 1 if the page is out of date or tests are missing."""
    try:
        current, rows = read_rows(root / ROWS)
    except BadRowsError as error:
        print(f"{ROWS}: {error}")
        return 1
    tests = find_tests(root, {row.id[0] for row in rows if re.fullmatch("[A-Z][0-9]+", row.id)})
    problems = list(gaps(current, rows, tests))
    page, path = render(current, rows, tests), root / TABLE
    if "--check" not in arguments:
        path.write_text(page, encoding="utf-8")
    elif not path.is_file() or path.read_text(encoding="utf-8") != page:
        problems.append(f"{TABLE} is stale: run `python tools/coverage_table.py`")
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

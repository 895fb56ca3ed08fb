"""Print a random sample of the project's English, for a reader to judge: comments and docstrings, and messages.

The seed is a commit id, so `python tools/sample_text.py --seed COMMIT` always prints the same lists in a checkout of
this commit. A comment is a whole block of comment lines. A message is a whole call that logs, prints or raises a text,
or that declares an option of a command.
"""

import argparse
import ast
import random
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from io import StringIO
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parent.parent / "src"
SIZE = 40
MIN_WORDS = 3
LOGS = {"debug", "info", "warning", "error", "exception", "critical"}
MESSAGES = re.compile(
    r"(print|echo|note|event|confirm|[Oo]ption|[Aa]rgument|Typer|InvalidInput|BadParameter|\w*Error|DemoFailed|\w+Missing"
    r"|\w+Lost|\w+Full|\w+Unavailable|\w+Unconfirmed|\w+Conflict|No[A-Z]\w+|RequestProblem)"
)
DIRECTIVE = re.compile(r"#\s*(type:|fmt:|!|-\*-)")


class Item(NamedTuple):
    """One text with its file and line."""

    path: str
    line: int
    text: str


def comments(path: str, source: str) -> Iterator[Item]:
    """Yield each block of comment lines, and each comment at the end of a line of code."""
    block: list[str] = []
    start = last = 0
    for token in tokenize.generate_tokens(StringIO(source).readline):
        text = re.sub(r"^#\s*(noqa: [\w, ]+ - )?", "", token.string)
        if token.type != tokenize.COMMENT or DIRECTIVE.match(token.string) or "noqa" in text:
            continue
        line, alone = token.start[0], not token.line[: token.start[1]].strip()
        if block and not (alone and line == last + 1):
            yield Item(path, start, "\n".join(block))
            block = []
        start = start if block else line
        block.append(text)
        last = line if alone else 0
    if block:
        yield Item(path, start, "\n".join(block))


def docstrings(path: str, tree: ast.Module) -> Iterator[Item]:
    """Yield the docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield Item(path, value.lineno, value.value)


def messages(path: str, tree: ast.Module) -> Iterator[Item]:
    """Yield the calls that log, print or raise a text, or declare an option."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            owner, _, name = ast.unparse(node.func).rpartition(".")
            arguments = (*node.args, *(keyword.value for keyword in node.keywords))
            texts = [a for a in arguments if isinstance(a, ast.Constant | ast.JoinedStr)]
            if (MESSAGES.fullmatch(name) or (name in LOGS and "log" in owner)) and any(
                is_readable(ast.unparse(text)) for text in texts
            ):
                yield Item(path, node.lineno, ast.unparse(node))


def is_readable(text: str) -> bool:
    """Return whether a text has enough words to be judged."""
    return len(re.findall(r"[A-Za-z]{2,}", text)) >= MIN_WORDS


def collect(source: Path) -> tuple[list[Item], list[Item]]:
    """Return all comments and docstrings, and all messages, of a source folder."""
    notes: list[Item] = []
    calls: list[Item] = []
    for file in sorted(source.rglob("*.py")):
        text, path = file.read_text(encoding="utf-8"), file.relative_to(source.parent).as_posix()
        tree = ast.parse(text)
        notes += [*comments(path, text), *docstrings(path, tree)]
        calls += messages(path, tree)
    return notes, calls


def sample(items: Iterable[Item], seed: str, size: int = SIZE) -> list[Item]:
    """Return ``size`` random items among those that are readable, ordered by file and line."""
    readable = sorted(item for item in items if is_readable(item.text))
    rng = random.Random(seed)  # noqa: S311 - no secret depends on it
    return sorted(rng.sample(readable, min(size, len(readable))))


def main(arguments: list[str], source: Path = SOURCE) -> int:
    """Print a sample of comments and docstrings, and a sample of messages."""
    parser = argparse.ArgumentParser(description="Print a random sample of comments and messages.")
    parser.add_argument("--seed", required=True, help="id of the commit that is checked out")
    seed = parser.parse_args(arguments).seed
    for title, items in zip(("Comments and docstrings", "Messages"), collect(source), strict=True):
        print(f"\n## {title}\n")
        for number, item in enumerate(sample(items, seed), start=1):
            print(f"{number:2}. [ ] {item.path}:{item.line}\n        {' '.join(item.text.split())}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

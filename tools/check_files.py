"""Check that source files are short, and that the product never executes or unpickles data.

A file above the limit should be split by topic. Data from outside must not become code, so in src no module may be
imported that can load code from data, and no text may be evaluated.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
CAP = 400
FOLDERS = ("src", "tests", "tools", "examples", "benchmarks")
MODULES = {"cPickle", "cloudpickle", "dill", "marshal", "pickle", "shelve"}
CALLS = {"eval", "exec", "yaml.load", "yaml.unsafe_load", "builtins.eval", "builtins.exec"}
LAST = {call.rpartition(".")[2] for call in CALLS}


def too_long(root: Path) -> Iterator[str]:
    """Yield a message for each Python or Lua file above the limit."""
    files = [root / "dev.py", *(path for name in FOLDERS for path in (root / name).rglob("*"))]
    for path in sorted(files):
        if path.suffix in {".py", ".lua"} and path.is_file():
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > CAP:
                yield f"{path.relative_to(root)}: {lines} lines, {CAP} are allowed"


def name_of(call: ast.Call) -> str | None:
    """Return the name of the called function without module or object, or None if the call has no name."""
    return getattr(call.func, "attr", None) or getattr(call.func, "id", None)


def forbidden(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each import or call that could turn data into code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        elif (
            isinstance(node, ast.Call) and name_of(node) in LAST and ast.unparse(node.func) in CALLS
        ):
            yield node.lineno, f"{ast.unparse(node.func)}()"
            continue
        else:
            continue
        for module in modules:
            if module.split(".")[0] in MODULES:
                yield node.lineno, f"import of {module}"


def unsafe(root: Path) -> Iterator[str]:
    """Yield a message for each forbidden import or call in src."""
    for path in sorted((root / "src").rglob("*.py")):
        for line, what in forbidden(ast.parse(path.read_text(encoding="utf-8"))):
            yield f"{path.relative_to(root)}:{line}: {what} is forbidden in src"


def main(root: Path = ROOT) -> int:
    """Print all problems; return 1 if there are any."""
    problems = [*too_long(root), *unsafe(root)]
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

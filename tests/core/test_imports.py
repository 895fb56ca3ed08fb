"""The modules that each package imports: core and the memory backend must not import a server, a store or a cluster."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

HEAVY = (
    "redis",
    "starlette",
    "uvicorn",
    "websockets",
    "typer",
    "rich",
    "pyspark",
    "pytest",
    "prefect",
)
PROGRAM = """
import sys
from {module} import *
print(*sorted({{name.partition(".")[0] for name in sys.modules}}))
"""


@pytest.mark.parametrize(
    ("module", "more"),
    [
        ("taskqueue_core", ("taskqueue_memory", "structlog")),
        ("taskqueue_memory", ("structlog",)),
        ("taskqueue_core.protocol.frames", ("taskqueue_memory", "structlog")),
    ],
)
def test_imports_are_lean(module: str, more: tuple[str, ...]) -> None:
    """G1: publishing imports no package of a server or of another backend, and core imports no backend."""
    command = [sys.executable, "-c", PROGRAM.format(module=module)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {*HEAVY, *more}


def _imports(tree: ast.Module, modules: set[str]) -> set[str]:
    """Return the modules imported by a module at import time or for type checking, but not inside functions."""
    inner = {
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    names: set[str] = set()
    for node in ast.walk(tree):
        if node in inner:
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            paths = {f"{node.module}.{alias.name}" for alias in node.names}
            names.update(path if path in modules else node.module for path in paths)
    return names & modules


def test_no_circles() -> None:
    """G6: there is no import cycle among the modules of the project, imports for type checking included."""
    source = Path(__file__).parents[2] / "src"
    files = {
        ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): path
        for path in source.rglob("*.py")
    }
    graph = {
        name: _imports(ast.parse(path.read_text(encoding="utf-8")), set(files)) - {name}
        for name, path in files.items()
    }
    assert sum(map(len, graph.values())) > 1000
    TopologicalSorter(graph).prepare()  # raises CycleError if there is a cycle

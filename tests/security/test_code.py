"""Static checks of the source code for forbidden constructs."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tools.check_files import forbidden, name_of

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "src").rglob("*.py"))
IMPORTERS = {
    "taskqueue_conformance/__init__.py": "its own modules, by a fixed table",
    "taskqueue_conformance/plugin.py": "a module of the kit, by a fixed name",
    "taskqueue_cli/app.py": "its own commands, by a fixed table",
    "taskqueue_cli/demo_frame/processes.py": "the demo's own programs",
    "taskqueue_core/__init__.py": "its own modules, by a fixed table",
    "taskqueue_core/loading.py": "the backend that the operator names",
    "taskqueue_worker/__init__.py": "its own modules, by a fixed table",
    "taskqueue_worker/child.py": "the application's modules that its parent process has imported",
    "taskqueue_worker/load.py": "the worker that the command line names",
    "taskqueue_spark/cli/session.py": "two libraries, by fixed names",
    "taskqueue_spark/worker_daemon.py": "libraries, by fixed names",
}
"""Modules that import by a name known only at run time, and where the name comes from; it is never from the network."""
NAMERS = {"__import__", "import_module", "run_path", "run_module"}
UNVERIFIED = {"taskqueue_redis/config.py": "TASKQUEUE_REDIS_DANGEROUSLY_SKIP_TLS_VERIFICATION"}
SECRETS = {"token", "secret", "sha256", "digest", "password"}
"""Names of values that must not be compared by ``==`` in the code for authentication."""
DOOR = sorted((ROOT / "src/taskqueue_server").glob("*.py"))


def trees(files: list[Path]) -> Iterator[tuple[str, ast.AST]]:
    """Yield the path under src and the syntax tree of each file."""
    for path in files:
        yield str(path.relative_to(ROOT / "src")), parsed(path)


@cache
def parsed(path: Path) -> ast.AST:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def test_nothing_turns_data_into_code() -> None:
    """Security 10: the source uses no pickle, marshal, shelve, yaml.load, eval or exec.

    The same is true for the code that runs in Spark (Security 27).
    """
    found = [(path, *what) for path, tree in trees(FILES) for what in forbidden(tree)]
    assert not found


@pytest.mark.parametrize(
    "code",
    ["__import__(name)", "importlib.import_module(n)", "import_module(n)", "runpy.run_path(p)"],
)
def test_imports_by_name_are_seen(code: str) -> None:
    """The check for imports by name, which the next test uses, recognises each form of such an import."""
    assert list(importing(ast.parse(code)))


def importing(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that import by a name known only at run time."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and name_of(node) in NAMERS:
            yield node.lineno


def test_nothing_is_imported_by_a_name_of_the_wire() -> None:
    """Security 10 and 11: only the modules on a short list import by a name known at run time.

    The server and the protocol are not among them.
    """
    assert {path for path, tree in trees(FILES) if list(importing(tree))} <= IMPORTERS.keys()
    for path in IMPORTERS:
        assert "/server/" not in path
        assert "/protocol/" not in path


def test_handlers_come_from_the_registry() -> None:
    """Security 11: a worker finds its handlers without ``getattr`` on a name that is not a constant."""
    for name in ("handlers", "runner", "outcomes", "batch_buffer", "prefetch"):
        tree = ast.parse((ROOT / f"src/taskqueue_worker/{name}.py").read_text("utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
                assert isinstance(node.args[1], ast.Constant), (name, node.lineno)


def test_certificates_are_always_looked_at() -> None:
    """Security 5: certificate verification is never disabled, except by one setting with an explicit name."""
    words = ("verify", "ssl", "CERT_NONE", "check_hostname")
    named = [file for file in FILES if any(word in file.read_text("utf-8") for word in words)]
    for path, tree in trees(named):
        for node in ast.walk(tree):
            text = ast.unparse(node) if isinstance(node, ast.keyword | ast.Assign) else ""
            if path in UNVERIFIED:
                continue
            assert text not in {"verify=False", "ssl=False"}, (path, text)
            assert "CERT_NONE" not in text, (path, text)
            assert not text.endswith("check_hostname = False"), (path, text)


def test_secrets_are_compared_in_constant_time() -> None:
    """Security 1: the server code compares no secret by ``==`` or ``in``.

    `Tokens.identify` compares in constant time instead.
    """
    for path, tree in trees(DOOR):
        for node in ast.walk(tree):
            if not isinstance(node, ast.Compare):
                continue
            kinds = {type(op) for op in node.ops}
            if kinds & {ast.Eq, ast.NotEq, ast.In, ast.NotIn}:
                names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
                names |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
                assert not names & SECRETS, (path, node.lineno, ast.unparse(node))


def test_scripts_are_files() -> None:
    """Security 20: Lua scripts are read from files and never built from strings.

    Values are passed only as KEYS and ARGV.
    """
    for path, tree in trees(sorted((ROOT / "src/taskqueue_redis").rglob("*.py"))):
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                text = ast.unparse(node)
                assert "redis.call" not in text, (path, node.lineno)
                assert "ARGV" not in text, (path, node.lineno)
    for script in (ROOT / "src/taskqueue_redis/lua").rglob("*.lua"):
        text = script.read_text(encoding="utf-8")
        assert "loadstring" not in text, script
        assert "load(" not in text.replace("payload(", ""), script


def test_the_supply() -> None:
    """Security 23: every dependency has a lower and an upper bound, and uvicorn has at least the fixed version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(one for some in extras.values() for one in some)]
    for one in wanted:
        if not one.startswith("taskqueue-backends") and "protobuf" not in one:
            assert ">=" in one, one
            assert "<" in one, one
    assert any(one.startswith("uvicorn>=0.52.1") for one in extras["server"])


def test_the_policy() -> None:
    """Security 28: SECURITY.md says how to report a vulnerability and when to expect a response."""
    text = (ROOT / "SECURITY.md").read_text("utf-8")
    for words in ("Report a vulnerability", "48 hours", "7 days", "14 days"):
        assert words in text

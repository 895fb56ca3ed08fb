"""What the product's code must not do, read from the code."""

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
    "taskqueue_cli/demo_frame/processes.py": "the demo's own programs",
    "taskqueue_core/loading.py": "the backend that the operator names",
    "taskqueue_worker/load.py": "the worker that the command line names",
    "taskqueue_spark/cli/session.py": "two libraries, by fixed names",
    "taskqueue_spark/worker_daemon.py": "libraries, by fixed names",
}
"""who imports by a name at run time, and whose name that is: never the wire's"""
NAMERS = {"__import__", "import_module", "run_path", "run_module"}
UNVERIFIED = {"taskqueue_redis/config.py": "TASKQUEUE_REDIS_DANGEROUSLY_SKIP_TLS_VERIFICATION"}
SECRETS = {"token", "secret", "sha256", "digest", "password"}
"""names of what must not be compared by == where it decides who comes in"""
DOOR = sorted((ROOT / "src/taskqueue_server").glob("*.py"))


def trees(files: list[Path]) -> Iterator[tuple[str, ast.AST]]:
    """Each file by its path under src, parsed."""
    for path in files:
        yield str(path.relative_to(ROOT / "src")), parsed(path)


@cache
def parsed(path: Path) -> ast.AST:
    """A file's tree."""
    return ast.parse(path.read_text(encoding="utf-8"))


def test_nothing_turns_data_into_code() -> None:
    """Security 10: no pickle, marshal, shelve, yaml.load, eval or exec; in Spark's code neither (Security 27)."""
    found = [(path, *what) for path, tree in trees(FILES) for what in forbidden(tree)]
    assert not found


@pytest.mark.parametrize(
    "code",
    ["__import__(name)", "importlib.import_module(n)", "import_module(n)", "runpy.run_path(p)"],
)
def test_imports_by_name_are_seen(code: str) -> None:
    """The next test would find them."""
    assert list(importing(ast.parse(code)))


def importing(tree: ast.AST) -> Iterator[int]:
    """The lines that import what is named at run time."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and name_of(node) in NAMERS:
            yield node.lineno


def test_nothing_is_imported_by_a_name_of_the_wire() -> None:
    """Security 10 and 11: who imports by name is on a short list, and none of them is the server or a handler's way."""
    assert {path for path, tree in trees(FILES) if list(importing(tree))} <= IMPORTERS.keys()
    for path in IMPORTERS:
        assert "/server/" not in path
        assert "/protocol/" not in path


def test_handlers_come_from_the_registry() -> None:
    """Security 11: where a worker looks for a handler there is no getattr with a name that is not written there."""
    for name in ("handlers", "runner", "outcomes", "batch_buffer", "prefetch"):
        tree = ast.parse((ROOT / f"src/taskqueue_worker/{name}.py").read_text("utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
                assert isinstance(node.args[1], ast.Constant), (name, node.lineno)


def test_certificates_are_always_looked_at() -> None:
    """Security 5: no verify=False, CERT_NONE or check_hostname=False, but for the switch with the alarming name."""
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
    """Security 1: at the door no secret is compared by == or looked up in a table; `Tokens.identify` shows how."""
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
    """Security 20: Lua is read from files as it is, never put together; values come as KEYS and ARGV alone."""
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
    """Security 23: every dependency has a lower and an upper bound, and uvicorn the floor that its fix needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(one for some in extras.values() for one in some)]
    for one in wanted:
        if not one.startswith("taskqueue-backends") and "protobuf" not in one:
            assert ">=" in one, one
            assert "<" in one, one
    assert any(one.startswith("uvicorn>=0.52.1") for one in extras["server"])


def test_the_policy() -> None:
    """Security 28: whom to write to, and how soon there is an answer."""
    text = (ROOT / "SECURITY.md").read_text("utf-8")
    for words in ("Report a vulnerability", "48 hours", "7 days", "14 days"):
        assert words in text

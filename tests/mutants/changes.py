"""Small mistakes in a source: every place where one can be made, and the source with it."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

__all__ = ["Mutant", "mutants_of"]

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_DECLARED = frozenset({"frozen", "kw_only"})
"""what a class declares for the type checker, which is who would notice"""
_LUA = (
    ("comparison", re.compile(r"(?<=\s)(==|~=|<=|>=|<|>)(?=\s)"), {
        "==": "~=", "~=": "==", "<": "<=", "<=": "<", ">": ">=", ">=": ">",
    }),
    ("boolean", re.compile(r"\b(and|or)\b"), {"and": "or", "or": "and"}),
    ("boolean", re.compile(r"\bnot "), {"not ": ""}),
    ("arithmetic", re.compile(r"(?<=\s)[+-](?=\s)"), {"+": "-", "-": "+"}),
    ("constant", re.compile(r"\b(true|false)\b"), {"true": "false", "false": "true"}),
)  # fmt: skip
_CALL = re.compile(r"^(?!local|return|function|end|if|for|while)\w+\(.*\)$")


class Mutant(NamedTuple):
    """A source with one mistake."""

    path: str
    line: int
    kind: str
    before: str
    after: str
    make: Callable[[], str]
    """gives the source with it"""
    number: int = 0
    """which of the same changes in its file it is"""

    @property
    def name(self) -> str:
        """What it is known by while its line is not rewritten: line numbers are not part of it."""
        return f"{self.path}: {self.kind}: {self.before} -> {self.after}{' #' * bool(self.number)}{self.number or ''}"


def mutants_of(root: Path, path: str) -> list[Mutant]:
    """Return every mutant of a file."""
    source = (root / path).read_text()
    found = _of_lua(path, source) if path.endswith(".lua") else _of_python(path, source)
    seen: dict[str, int] = {}
    numbered = []
    for mutant in found:
        number = seen[mutant.name] = seen.get(mutant.name, -1) + 1
        numbered.append(mutant._replace(number=number))
    return numbered


# Python, by its syntax tree


def _of_python(path: str, source: str) -> Iterator[Mutant]:
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    skipped = _skipped(nodes)
    for place, node in enumerate(nodes):
        if id(node) in skipped:
            continue
        for kind, after in _changed(node):
            line = getattr(node, "lineno", 0)
            make = partial(_made, tree, place, after)
            yield Mutant(path, line, kind, _short(node), _short(after), make)


def _made(tree: ast.AST, place: int, after: ast.AST) -> str:
    changed = copy.deepcopy(tree)
    _put(changed, list(ast.walk(changed))[place], after)
    return ast.unparse(ast.fix_missing_locations(changed))


def _skipped(nodes: list[ast.AST]) -> set[int]:
    """Return what no test has to notice: annotations, names that are offered, and the words of errors."""
    skipped: set[int] = set()
    for node in nodes:
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.arg):
            parts = [node.annotation]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parts = [node.returns, *node.decorator_list]
        elif isinstance(node, ast.ClassDef):
            parts = [word for word in node.keywords if word.arg in _DECLARED]
        elif isinstance(node, ast.AnnAssign):
            parts = [node.annotation]
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            parts = [node] if node.targets[0].id == "__all__" else []
        elif isinstance(node, ast.Raise):
            parts = [node]
        for part in filter(None, parts):
            skipped.update(id(inner) for inner in ast.walk(part))
    return skipped


def _changed(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Give what may stand in the place of a node."""
    yield from _decided(node)
    yield from _computed(node)
    match node:
        case ast.Return(value=ast.expr()) if not isinstance(node.value, ast.Constant):
            yield "return", ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.Delete():
            yield "statement", ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "statement", ast.Pass()


def _decided(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    match node:
        case ast.Compare(ops=[op]):
            yield "comparison", ast.Compare(node.left, [_COMPARISONS[type(op)]()], node.comparators)
        case ast.BoolOp(op=ast.And()):
            yield "boolean", ast.BoolOp(ast.Or(), node.values)
        case ast.BoolOp(op=ast.Or()):
            yield "boolean", ast.BoolOp(ast.And(), node.values)
        case ast.UnaryOp(op=ast.Not()):
            yield "boolean", node.operand
        case ast.If(test=ast.Name() | ast.Attribute() | ast.Call()):
            yield "boolean", ast.If(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)


def _computed(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    match node:
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield "constant", ast.Constant(value + 1)
        case ast.Constant(value=float(value)):
            yield "constant", ast.Constant(value + 1)
        case ast.BinOp(op=ast.Add()) if not _is_text(node):
            yield "arithmetic", ast.BinOp(node.left, ast.Sub(), node.right)
        case ast.BinOp(op=ast.Sub()):
            yield "arithmetic", ast.BinOp(node.left, ast.Add(), node.right)
        case ast.AugAssign(op=ast.Add()):
            yield "arithmetic", ast.AugAssign(node.target, ast.Sub(), node.value)


def _is_text(node: ast.BinOp) -> bool:
    return any(isinstance(inner, ast.JoinedStr | ast.Tuple | ast.List) for inner in ast.walk(node))


def _put(tree: ast.AST, victim: ast.AST, after: ast.AST) -> None:
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            if value is victim:
                setattr(parent, field, after)
            elif isinstance(value, list) and any(one is victim for one in value):
                setattr(parent, field, [after if one is victim else one for one in value])


def _short(node: ast.AST) -> str:
    return ast.unparse(ast.fix_missing_locations(copy.deepcopy(node))).split("\n")[0][:80]


# Lua, by its lines


def _of_lua(path: str, source: str) -> Iterator[Mutant]:
    lines = source.split("\n")
    for n, line in enumerate(lines):
        code, mark, comment = line.partition("--")
        if not code.strip():
            continue
        for kind, after in _changed_lua(code):
            make = partial("\n".join, [*lines[:n], after + mark + comment, *lines[n + 1 :]])
            yield Mutant(path, n + 1, kind, code.strip()[:80], after.strip()[:80], make)


def _changed_lua(code: str) -> Iterator[tuple[str, str]]:
    for kind, pattern, instead in _LUA:
        for found in pattern.finditer(code):
            yield kind, code[: found.start()] + instead[found[0]] + code[found.end() :]
    if _CALL.match(code.strip()):
        yield "statement", ""

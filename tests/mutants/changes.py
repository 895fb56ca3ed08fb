"""Generating mutants: all single small changes of a source file."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_DECLARED = frozenset({"frozen", "kw_only"})
"""class keywords that only the type checker notices"""
_LUA = (
    ("comparison", re.compile(r"(?<=\s)(==|~=|<=|>=|<|>)(?=\s)"), {
        "==": "~=", "~=": "==", "<": "<=", "<=": "<", ">": ">=", ">=": ">",
    }),
    ("boolean", re.compile(r"\b(and|or)\b"), {"and": "or", "or": "and"}),
    ("boolean", re.compile(r"\bnot "), {"not ": ""}),
    ("arithmetic", re.compile(r"(?<=\s)[+-](?=\s)"), {"+": "-", "-": "+"}),
    ("constant", re.compile(r"\b(true|false)\b"), {"true": "false", "false": "true"}),
)  # fmt: skip
_LUA_FUNCTION = re.compile(r"^(?:local )?function (\w+)")
_CALL = re.compile(r"^(?!local|return|function|end|if|for|while)\w+\(.*\)$")


class Where(NamedTuple):
    """The position of a change in a source file."""

    line: int
    span: tuple[int, int] = (0, 0)
    """first and last line of the changed code; for a compound statement, of its condition only"""
    statement: tuple[int, int] = (0, 0)
    """first and last line of the enclosing statement, without the statements in its body"""
    scope: str = ""
    """``__qualname__`` of the enclosing function or class"""
    in_function: bool = False
    """whether the code runs when a function is called; otherwise it runs at import"""
    names: frozenset[str] = frozenset()
    """names in the module or class that the enclosing statement defines"""


class Mutant(NamedTuple):
    """A source file with one small change."""

    path: str
    where: Where
    kind: str
    before: str
    after: str
    change: Callable[[], str | ast.Module]
    """returns the changed source; for Python, as a syntax tree with the original line numbers"""
    number: int = 0
    """index among identical changes in the same file"""

    @property
    def name(self) -> str:
        """The name in verdicts and in `accepted.toml`, which has no line number, so that it stays valid."""
        return f"{self.path}: {self.kind}: {self.before} -> {self.after}{' #' * bool(self.number)}{self.number or ''}"

    @property
    def identity(self) -> str:
        """A name without the path of the file, so that it stays the same when the file is renamed."""
        return f"{self.where.scope}: {self.name.partition(': ')[2]}"

    def source(self) -> str:
        """Return the changed source as text."""
        made = self.change()
        return made if isinstance(made, str) else ast.unparse(made)


def mutants_of(root: Path, path: str) -> list[Mutant]:
    """Return all mutants of a file."""
    source = (root / path).read_text()
    found = _of_lua(path, source) if path.endswith(".lua") else _of_python(path, source)
    seen: dict[str, int] = {}
    numbered = []
    for mutant in found:
        number = seen[mutant.name] = seen.get(mutant.name, -1) + 1
        numbered.append(mutant._replace(number=number))
    return numbered


# Python files are changed in their syntax tree.


def _of_python(path: str, source: str) -> Iterator[Mutant]:
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    skipped = _skipped(nodes)
    where: dict[int, Where] = {}
    _locate(tree, Where(0), where)
    for index, node in enumerate(nodes):
        if id(node) in skipped:
            continue
        for kind, after in _changed(node):
            change = partial(_with_change, tree, index, after)
            yield Mutant(path, where[id(node)], kind, _short(node), _short(after), change)


def _with_change(tree: ast.Module, index: int, after: ast.AST) -> ast.Module:
    changed = copy.deepcopy(tree)
    replaced = list(ast.walk(changed))[index]
    if isinstance(after, ast.expr | ast.stmt):
        ast.copy_location(after, replaced)
    _put(changed, replaced, after)
    return ast.fix_missing_locations(changed)


def _locate(node: ast.AST, around: Where, found: dict[int, Where]) -> None:
    """Record the position of each node of a tree."""
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                here = _where(child, _inside(node, field, around))
                found[id(child)] = here
                _locate(child, here, found)


def _inside(node: ast.AST, field: str, around: Where) -> Where:
    """Return the position of the children in a field of a node, as far as the node determines it."""
    if isinstance(node, ast.Lambda) and field == "body":
        return around._replace(in_function=True)
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return around
    if field != "body":
        return around._replace(names=around.names | {node.name})
    scope = ".".join(filter(None, [around.scope, node.name]))
    if isinstance(node, ast.ClassDef):
        return around._replace(scope=scope, names=around.names | {node.name})
    return around._replace(scope=f"{scope}.<locals>", in_function=True)


def _where(node: ast.AST, around: Where) -> Where:
    first = getattr(node, "lineno", around.line)
    last = getattr(node, "end_lineno", None) or first
    body = getattr(node, "body", None) or getattr(node, "cases", None)
    if isinstance(node, ast.stmt) and isinstance(body, list):
        inner = getattr(body[0], "lineno", None) or body[0].pattern.lineno
        last = max(first, inner - 1)
    here = around._replace(line=first, span=(first, last))
    if not isinstance(node, ast.stmt):
        return here
    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    return here._replace(statement=(first, last), names=around.names | names)


def _skipped(nodes: list[ast.AST]) -> set[int]:
    """Return the ids of nodes that tests need not notice: annotations, ``__all__`` and the text of errors."""
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
    """Yield the possible replacements of a node, each with its kind."""
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


# Lua files are changed line by line.


def _of_lua(path: str, source: str) -> Iterator[Mutant]:
    lines = source.split("\n")
    scope = ""
    for n, line in enumerate(lines):
        code, mark, comment = line.partition("--")
        if not code.strip():
            continue
        scope = found[1] if (found := _LUA_FUNCTION.match(code)) else scope
        for kind, after in _changed_lua(code):
            change = partial("\n".join, [*lines[:n], after + mark + comment, *lines[n + 1 :]])
            where = Where(n + 1, scope=scope)
            yield Mutant(path, where, kind, code.strip()[:80], after.strip()[:80], change)


def _changed_lua(code: str) -> Iterator[tuple[str, str]]:
    for kind, pattern, instead in _LUA:
        for found in pattern.finditer(code):
            yield kind, code[: found.start()] + instead[found[0]] + code[found.end() :]
    if _CALL.match(code.strip()):
        yield "statement", ""

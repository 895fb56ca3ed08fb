"""Small mistakes in a source: every place where one can be made, and the source with it."""

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
_LUA_FUNCTION = re.compile(r"^(?:local )?function (\w+)")
_CALL = re.compile(r"^(?!local|return|function|end|if|for|while)\w+\(.*\)$")


class Where(NamedTuple):
    """Where a mistake is made."""

    line: int
    span: tuple[int, int] = (0, 0)
    """first and last line of what is changed; of a compound statement, of its condition alone"""
    statement: tuple[int, int] = (0, 0)
    """first and last line of the statement around it, without the statements inside"""
    scope: str = ""
    """the function or class around it, as its ``__qualname__`` has it"""
    in_function: bool = False
    """whether it takes effect when a function runs; otherwise, when the module is imported"""
    names: frozenset[str] = frozenset()
    """what the module or the class is given by the statement around it"""


class Mutant(NamedTuple):
    """A source with one mistake."""

    path: str
    where: Where
    kind: str
    before: str
    after: str
    change: Callable[[], str | ast.Module]
    """gives the source with the mistake; for Python, as a syntax tree with the lines of the original"""
    number: int = 0
    """which of the same changes in its file it is"""

    @property
    def name(self) -> str:
        """How verdicts and `accepted.toml` name it: line numbers are not part of it."""
        return f"{self.path}: {self.kind}: {self.before} -> {self.after}{' #' * bool(self.number)}{self.number or ''}"

    @property
    def identity(self) -> str:
        """What stays the same when its file gets another name."""
        return f"{self.where.scope}: {self.name.partition(': ')[2]}"

    def source(self) -> str:
        """Return the source with the mistake."""
        made = self.change()
        return made if isinstance(made, str) else ast.unparse(made)


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
    """Note where each part of a tree is."""
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                here = _where(child, _inside(node, field, around))
                found[id(child)] = here
                _locate(child, here, found)


def _inside(node: ast.AST, field: str, around: Where) -> Where:
    """Return where the parts in a field of a node are, as far as the node decides."""
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

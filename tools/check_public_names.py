"""Check that every package in src lists its public names in `__all__`.

The `__all__` of a package must be a literal list, sorted as ruff sorts it (RUF022). It must contain exactly the names
that the package defines or re-exports, and a re-exported name must be public in its module. A module has an `__all__`
only if authors of backends import from it; in other modules a leading underscore marks private names.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent


def declared(tree: ast.Module) -> list[str] | None:
    """Return the names in `__all__`, or None if it is missing or not a literal list of strings."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            try:
                return [str(name) for name in ast.literal_eval(node.value)]  # type: ignore[attr-defined]
            except ValueError:
                return None
    return None


def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    # Imports may be in a `with` block, as `with needs_extra("worker")` in a package with dependencies.
    tree.body = [
        part for node in tree.body for part in (node.body if isinstance(node, ast.With) else [node])
    ]
    return tree


def origin(package: Path, source: Path, node: ast.ImportFrom) -> Path | None:
    """Return the path, without suffix, of the module that an import names; None if it is outside of the package."""
    if node.level:
        base = package.parents[node.level - 2] if node.level > 1 else package
    elif (node.module or "").split(".")[0] == package.relative_to(source).parts[0]:
        base = source
    else:
        return None
    return base.joinpath(*(node.module or "").split(".")) if node.module else base


def public_names(module: Path) -> list[str] | None:
    """Return the public names of the module or package at a path without suffix; None if there is no such module.

    These are the names in `__all__`, or all names that the module defines if it has no `__all__`.
    """
    for path in (module.with_suffix(".py"), module / "__init__.py"):
        if path.is_file():
            tree = parse(path)
            names = declared(tree)
            return sorted(defined(tree) | assigned(tree)) if names is None else names
    return None


def defined(tree: ast.Module) -> set[str]:
    """Return the public functions and classes that the package itself defines."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    names = {node.name for node in tree.body if isinstance(node, kinds)}
    return {name for name in names if not name.startswith("_")}


def assigned(tree: ast.Module) -> set[str]:
    """Return the names that the package assigns, which `__all__` may or may not contain."""
    targets = [t for node in tree.body if isinstance(node, ast.Assign) for t in node.targets]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Return the statements of the module, including those under `if TYPE_CHECKING`, which name its lazy imports."""
    for node in tree.body:
        lazy = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        yield from node.body if lazy and isinstance(node, ast.If) else [node]


def re_exported(tree: ast.Module, package: Path, source: Path) -> Iterator[tuple[str, str]]:
    """Yield each public name that is imported from within the package, with a problem or an empty text."""
    for node in statements(tree):
        module = origin(package, source, node) if isinstance(node, ast.ImportFrom) else None
        if module is None or not isinstance(node, ast.ImportFrom):
            continue
        theirs = public_names(module) or []
        for alias in node.names:
            submodule = module / alias.name
            public = (
                alias.name in theirs or submodule.is_dir() or submodule.with_suffix(".py").is_file()
            )
            where = ".".join(module.relative_to(source).parts)
            name = alias.asname or alias.name
            if not name.startswith("_"):
                yield name, "" if public else f"{name} is not a public name of {where}"


def borrowed(tree: ast.Module, source: Path) -> set[str]:
    """Return the names imported from other packages of the project, which `__all__` may or may not contain."""
    return {
        alias.asname or alias.name
        for node in statements(tree)
        if isinstance(node, ast.ImportFrom)
        and (source / (node.module or "").split(".")[0]).is_dir()
        for alias in node.names
    }


def misplaced(tree: ast.Module) -> Iterator[str]:
    """Yield a problem for each lazy import whose module in `_MODULES` is not the one under `if TYPE_CHECKING`."""
    imports = [node for node in statements(tree) if isinstance(node, ast.ImportFrom)]
    typed = {
        (each.name, node.module) for node in imports if node not in tree.body for each in node.names
    }
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_MODULES":
            used = set(ast.literal_eval(node.value).items())
            for name in sorted({str(name) for name, _ in typed ^ used}):
                yield f"{name} must have one module in _MODULES, and the same one under TYPE_CHECKING"


def problems(init: Path, source: Path) -> Iterator[str]:
    """Yield the problems with the public names of one package."""
    tree = parse(init)
    imported = dict(re_exported(tree, init.parent, source))
    yield from filter(None, imported.values())
    yield from misplaced(tree)
    offered = {*imported, *defined(tree)}
    listed = declared(tree)
    if listed is None:
        if offered:
            yield "__all__ is absent, or is not a plain list of strings"
        return
    for name in sorted(offered - set(listed)):
        yield f"{name} is offered but not in __all__"
    for name in sorted(set(listed) - offered - assigned(tree) - borrowed(tree, source)):
        yield f"{name} is in __all__ but neither defined nor re-exported"


def main(root: Path = ROOT) -> int:
    """Print all problems; return 1 if there are any."""
    found = [
        f"{init.relative_to(root)}: {problem}"
        for init in sorted((root / "src").rglob("__init__.py"))
        for problem in problems(init, root / "src")
    ]
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

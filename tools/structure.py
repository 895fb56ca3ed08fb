"""Print figures about the source code: files, lines, shares, directions and cycles of imports, and equal names."""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"
SMALL = 60
PRODUCTS = "taskqueue_"


def modules(source: Path) -> dict[str, tuple[Path, ast.Module]]:
    """Return the path and the syntax tree of each module of the project, by its dotted name."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        name = ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        found[name] = path, ast.parse(path.read_text(encoding="utf-8"))
    return found


def imports(name: str, path: Path, tree: ast.Module, known: set[str]) -> Iterator[tuple[str, bool]]:
    """Yield each module of the project that a module imports, and whether it is imported only for type checking."""

    def walk(node: ast.AST, *, types: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                for statement in child.body:
                    yield from walk(ast.Module([statement], []), types=True)
                continue
            if isinstance(child, ast.Import):
                yield from ((alias.name, types) for alias in child.names if alias.name in known)
            elif isinstance(child, ast.ImportFrom):
                package = name if path.name == "__init__.py" else name.rpartition(".")[0]
                for _ in range(child.level - 1):
                    package = package.rpartition(".")[0]
                base = (
                    ".".join(filter(None, (package, child.module)))
                    if child.level
                    else child.module or ""
                )
                for alias in child.names:
                    target = f"{base}.{alias.name}"
                    if target in known or base in known:
                        yield target if target in known else base, types
            yield from walk(child, types=types)

    yield from walk(tree, types=False)


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import one another (strongly connected components of two and more)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(node: str) -> None:
        number[node] = lowest[node] = len(number)
        stack.append(node)
        for following in sorted(edges.get(node, ())):
            if following not in number:
                visit(following)
                lowest[node] = min(lowest[node], lowest[following])
            elif following in stack:
                lowest[node] = min(lowest[node], number[following])
        if lowest[node] == number[node]:
            group = []
            while (last := stack.pop()) != node:
                group.append(last)
            if group:
                groups.append(sorted([*group, node]))

    sys.setrecursionlimit(10_000)
    for node in sorted(edges):
        if node not in number:
            visit(node)
    return groups


def folder(name: str) -> str:
    """Return the folder, or the top-level module, to which a module of the server belongs."""
    return name.split(".")[1]


def main() -> None:
    """Print the figures."""
    known = modules(SOURCE)
    lines = {
        name: len(path.read_text(encoding="utf-8").splitlines())
        for name, (path, _) in known.items()
    }
    whole = sum(lines.values())
    core = sum(number for name, number in lines.items() if name.startswith("taskqueue_core"))
    print(f"Python files / lines: {len(known)} / {whole}")
    print(f"share of taskqueue_core: {core / whole:.0%} ({core} lines)")
    small = [
        name
        for name, (path, _) in known.items()
        if path.name != "__init__.py" and lines[name] <= SMALL
    ]
    print(f"files of {SMALL} lines or fewer, without __init__: {len(small)}")
    edges: dict[str, set[str]] = defaultdict(set)
    type_only = []
    for name, (path, tree) in known.items():
        for target, types in imports(name, path, tree, set(known)):
            # The __init__ of a package imports its modules to re-export their names. This does not count as a cycle.
            if target != name and not name.startswith(f"{target}.") and path.name != "__init__.py":
                edges[name].add(target)
                if types:
                    type_only.append(f"{name} -> {target}")
    pairs = {
        (folder(name), folder(target))
        for name, targets in edges.items()
        for target in targets
        if name.startswith("taskqueue_server.") and target.startswith("taskqueue_server.")
        if folder(name) != folder(target)
    }
    both = sorted(pair for pair in pairs if pair[0] < pair[1] and pair[::-1] in pairs)
    print(f"pairs of places in the server that import each other: {len(both)} {both or ''}")
    print(f"type-only imports / import circles: {len(type_only)} / {len(circles(edges))}")
    for line in [*type_only, *(" <-> ".join(group) for group in circles(edges))]:
        print(f"  {line}")
    gerunds = sorted(
        name
        for name, (path, _) in known.items()
        if path.name != "__init__.py" and path.stem.removesuffix("s").endswith("ing")
    )
    print(f"modules whose name ends in -ing or -ings: {len(gerunds)}")
    print(f"  {', '.join(gerunds)}")
    classes: dict[str, list[str]] = defaultdict(list)
    for name, (_, tree) in known.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(name)
    twice = {name: places for name, places in classes.items() if len(places) > 1}
    within = [
        name
        for name, places in twice.items()
        if len({p.split(".")[0] for p in places}) < len(places)
    ]
    print(
        f"public class names defined more than once: {len(twice)} ({sum(map(len, twice.values()))} classes)"
    )
    print(f"  within one package: {', '.join(sorted(within)) or 'none'}")
    for name, places in sorted(twice.items()):
        print(f"  {name}: {', '.join(places)}")
    listed = sum(
        node.end_lineno - node.lineno + 1
        for _, tree in known.values()
        for node in tree.body
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "__all__"
        and node.end_lineno is not None
    )
    print(f"lines of __all__: {listed}")


if __name__ == "__main__":
    main()

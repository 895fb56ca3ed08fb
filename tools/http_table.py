"""Writes the tables of operations, from those that the server is made of, into the pages; --check only compares."""

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path

from taskqueue_dispatch.api.extension import OPERATIONS as DISPATCH
from taskqueue_server.api.table import OPERATIONS
from taskqueue_server.routing.operations import Operation

DOCS = Path(__file__).parent.parent / "docs"
TABLES = {"http.md": OPERATIONS, "dispatcher.md": DISPATCH}
BEGIN, END = "<!-- operations -->\n", "<!-- end of operations -->\n"


def table(operations: Sequence[Operation]) -> str:
    """Return the table, with a heading per tag."""
    lines = []
    for tag in dict.fromkeys(operation.tag for operation in operations):
        lines += [f"\n### {tag.capitalize()}\n", "| operation | verb | |", "| --- | --- | --- |"]
        for one in operations:
            if one.tag == tag:
                summary = (inspect.getdoc(one.handler) or "").partition("\n")[0].replace("``", "`")
                verb = " or ".join(f"`{verb}`" for verb in one.verbs) or "none"
                if one.verbs and one.scope == "server":
                    verb += ", all keys"
                lines.append(f"| `{one.method} {one.address}` | {verb} | {summary} |")
    return "\n".join(lines) + "\n\n"


def main(arguments: list[str]) -> int:
    """Write them; with --check return 1 where that would change a page."""
    wrong = 0
    for name, operations in TABLES.items():
        path = DOCS / name
        page = path.read_text(encoding="utf-8")
        head, _, rest = page.partition(BEGIN)
        _, _, tail = rest.partition(END)
        fresh = f"{head}{BEGIN}{table(operations)}{END}{tail}"
        if "--check" not in arguments:
            path.write_text(fresh, encoding="utf-8")
        elif fresh != page:
            print(f"docs/{name} is not what the server has: run `python3 tools/http_table.py`.")
            wrong = 1
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

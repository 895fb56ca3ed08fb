"""Write the tables of the server's operations into the documentation pages. With --check, only compare."""

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
    """Return the table of operations as Markdown, with a heading for each tag."""
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
    """Write the tables; with --check, return 1 if a page is out of date."""
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

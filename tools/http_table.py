"""Writes the table of operations in docs/http.md, from the table that the server is made of; --check only compares."""

import inspect
import sys
from pathlib import Path

from taskqueue_core.server.api.table import OPERATIONS

PAGE = Path(__file__).parent.parent / "docs" / "http.md"
BEGIN, END = "<!-- operations -->\n", "<!-- end of operations -->\n"


def table() -> str:
    """The table, a heading per tag."""
    lines = []
    for tag in dict.fromkeys(operation.tag for operation in OPERATIONS):
        lines += [f"\n### {tag.capitalize()}\n", "| operation | verb | |", "| --- | --- | --- |"]
        for one in OPERATIONS:
            if one.tag == tag:
                summary = (inspect.getdoc(one.handler) or "").partition("\n")[0].replace("``", "`")
                verb = " or ".join(f"`{verb}`" for verb in one.verbs) or "none"
                if one.verbs and one.scope == "server":
                    verb += ", all keys"
                lines.append(f"| `{one.method} {one.path}` | {verb} | {summary} |")
    return "\n".join(lines) + "\n\n"


def main(arguments: list[str]) -> int:
    """Write it; with --check return 1 where that would change the page."""
    page = PAGE.read_text(encoding="utf-8")
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    fresh = f"{head}{BEGIN}{table()}{END}{tail}"
    if "--check" in arguments:
        if fresh != page:
            print("docs/http.md is not what the server has: run `python3 tools/http_table.py`.")
        return int(fresh != page)
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Write the generated part of ``docs/performance.md``. Usage: ``python benchmarks/report.py [RESULT [AOF-RESULT]]``.

Without arguments it takes the newest result that has a comparison. What stands outside the two marks
of the page is written by hand and stays.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import catalog
import plot
import render
from tables import shown

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "performance.md"
PICTURE = HERE / "performance.svg"
BEGIN = "<!-- figures: begin, written by benchmarks/report.py -->"
END = "<!-- figures: end -->"
IMAGE = f"![Ours beside floors and peers](../{PICTURE.relative_to(HERE.parent)})"
_PANELS = (
    ("drain", "Drain, tasks per second (more is better)"),
    ("bulk", "Bulk publish, tasks per second (more is better)"),
    ("publish", "Publish one by one, tasks per second (more is better)"),
    ("p99", "Publish to handler at 200/s, p99 in ms (less is better)"),
)


def main(paths: list[str]) -> int:
    """Write the page and the picture; return the exit status."""
    results = [json.loads(Path(path).read_text()) for path in paths or [_newest()]]
    parts = [_part(result) for result in results]
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text("\n".join([before + BEGIN, "", *parts, END + after]))
    PICTURE.write_text(_picture(results[0]["side_by_side"]))
    print(f"wrote {PAGE.name} and {PICTURE.name}")
    return 0


def _newest() -> str:
    for path in sorted((HERE / "results").glob("*.json"), reverse=True):
        if json.loads(path.read_text()).get("side_by_side"):
            return str(path)
    raise SystemExit("there is no result with a comparison: run `python3 dev.py bench` first")


def _part(result: dict[str, Any]) -> str:
    run = result["side_by_side"]
    versions: list[dict[str, str]] = list(run["versions"].values())
    redis = versions[0]["redis-server"] if versions else "?"
    kept = "append-only file, everysec" if run["durable"] else "no persistence"
    where = (
        f"{result['time'][:10]}, {result['cores']} cores of {result['processor'] or result['machine']}, "
        f"Python {result['python']}, redis-server {redis}, {kept}."
    )
    tables = render.markdown(run)
    if run["durable"]:
        return f"## With an append-only file\n\n{where}\n\n{tables}"
    return f"## Figures\n\n{where}\n\n{IMAGE}\n\n{tables}\n{_versions(run)}\n{_promises(run)}"


def _versions(run: dict[str, Any]) -> str:
    lines = ["### Versions", ""]
    said = set()
    for entry, found in run["versions"].items():
        line = ", ".join(f"{k} {v}" for k, v in found.items() if k != "redis-server")
        if line not in said:
            said.add(line)
            lines.append(f"- {entry.partition(' ')[0]}: {line}")
    return "\n".join([*lines, ""])


def _promises(run: dict[str, Any]) -> str:
    known = {entry["name"] for entry in run["entries"]}
    return render.section(render.promises([one for one in catalog.ALL if one.name in known]))


def _picture(run: dict[str, Any]) -> str:
    kinds = {entry["name"]: entry["kind"] for entry in run["entries"]}
    panels = []
    for figure, title in _PANELS:
        cells = [c for c in run["summary"] if c["figure"] == figure and c["entry"] != "floor-again"]
        cells.sort(key=lambda cell: cell["value"], reverse=figure != "p99")
        dots = [
            plot.Dot(
                name=cell["entry"],
                kind=kinds[cell["entry"]],
                value=cell["value"],
                low=cell["low"],
                high=cell["high"],
                label=shown(cell["value"]) + (" (contended)" if cell["contended"] else ""),
            )
            for cell in cells
        ]
        if dots:
            panels.append((title, dots))
    return plot.chart(panels)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Write the generated parts of the pages. Usage: ``python benchmarks/report.py [RESULT [AOF-RESULT]]``.

Without arguments, each part is written from the newest result that contains it. The comparison, the socket, the
dispatcher and the pipeline are in ``docs/performance.md``, and the Prefect servers in ``docs/prefect.md``. A part
without a result stays unchanged, as does the text outside of the markers in a page, which is written by hand.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import catalog
import figures
import plot
import prefect_figures
import render
import spark_area
import targets
from tables import shown

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "performance.md"
SERVERS_PAGE = HERE.parent / "docs" / "prefect.md"
PICTURE = HERE.parent / "docs" / "performance.svg"
BEGIN = "<!-- figures: begin, written by benchmarks/report.py -->"
END = "<!-- figures: end -->"
PIPELINE_BEGIN = "<!-- figures of the pipeline: begin, written by benchmarks/report.py -->"
PIPELINE_END = "<!-- figures of the pipeline: end -->"
SERVERS_BEGIN = "<!-- figures of servers: begin, written by benchmarks/report.py -->"
SERVERS_END = "<!-- figures of servers: end -->"
IMAGE = f"![Ours compared with floors and peers](../{PICTURE.relative_to(HERE.parent)})"
_PANELS = (
    ("drain", "Drain, tasks per second (more is better)"),
    ("bulk", "Bulk publish, tasks per second (more is better)"),
    ("publish", "Publish one by one, tasks per second (more is better)"),
    ("p99", "Publish to handler at 200/s, p99 in ms (less is better)"),
)


def main(paths: list[str]) -> int:
    """Write the pages and the picture; return the exit code."""
    areas = {name: partial(_figures, name) for name in targets.AREAS}
    kinds = (_beside, *areas.values(), _pipeline, _servers)
    chosen = paths or [path for has in kinds if (path := _newest(has))]
    results = [json.loads(Path(path).read_text()) for path in dict.fromkeys(chosen)]
    comparisons, *of_areas, pipeline, servers = (
        [one for one in results if has(one)] for has in kinds
    )
    if not comparisons and not any(of_areas) and not pipeline and not servers:
        raise SystemExit("there is no result with a comparison: run `python3 dev.py bench` first")
    if servers:
        _write_servers(servers[0])
    page = PAGE.read_text()
    if comparisons:
        page = _between(page, BEGIN, END, [_part(result) for result in comparisons])
        PICTURE.write_text(_picture(comparisons[0]["side_by_side"]))
    for name, found in zip(areas, of_areas, strict=True):
        if found:
            what, _ = targets.AREAS[name]
            begin = f"<!-- figures of {what}: begin, written by benchmarks/report.py -->"
            end = f"<!-- figures of {what}: end -->"
            page = _between(page, begin, end, [_of_an_area(name, found[0])])
    if pipeline:
        page = _between(page, PIPELINE_BEGIN, PIPELINE_END, [_of_the_pipeline(pipeline[0])])
    PAGE.write_text(page)
    print(f"wrote {PAGE.name}")
    return 0


def _write_servers(result: dict[str, Any]) -> None:
    parts = [_of_servers(result)]
    page = _between(SERVERS_PAGE.read_text(), SERVERS_BEGIN, SERVERS_END, parts)
    SERVERS_PAGE.write_text(page)
    print(f"wrote {SERVERS_PAGE.name}")


def _between(page: str, begin: str, end: str, parts: list[str]) -> str:
    before, found, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise SystemExit(f"the page has no place for the figures: the marks {begin} and {end}")
    return "\n".join([before + begin, "", *parts, end + after])


def _newest(has: Callable[[dict[str, Any]], Any]) -> str | None:
    for path in sorted((HERE / "results").glob("*.json"), reverse=True):
        if has(json.loads(path.read_text())):
            return str(path)
    return None


def _beside(result: dict[str, Any]) -> Any:
    return result.get("side_by_side")


def _figures(area: str, result: dict[str, Any]) -> dict[str, Any]:
    return {n: found for n, found in result["figures"].items() if n.startswith(f"{area}: ")}


def _pipeline(result: dict[str, Any]) -> Any:
    return result.get("pipeline")


def _servers(result: dict[str, Any]) -> Any:
    return result.get("prefect")


def _of_an_area(area: str, result: dict[str, Any]) -> str:
    what, goals = targets.AREAS[area]
    found = figures.tables(_figures(area, result), goals, what)
    tables = [render.section(table, align="---:") for table in found]
    return "\n".join([f"{_machine(result)}.", "", *tables])


def _of_the_pipeline(result: dict[str, Any]) -> str:
    run = result["pipeline"]
    where = f"{_machine(result)}."
    tables = [render.section(table, align="---:") for table in spark_area.tables(run)]
    said = "\n".join(f"- {note}" for note in spark_area.notes(run))
    return "\n".join([where, "", *tables, said, ""])


def _of_servers(result: dict[str, Any]) -> str:
    run = result["prefect"]
    tables = [
        render.section(table, align="---:") for table in prefect_figures.tables(run["figures"])
    ]
    said = "\n".join(f"- {note}" for note in prefect_figures.notes(run))
    return "\n".join([f"{_machine(result)}.", "", *tables, said, ""])


def _machine(result: dict[str, Any]) -> str:
    return (
        f"{result['time'][:10]}, {result['cores']} cores of {result['processor'] or result['machine']}, "
        f"Python {result['python']}"
    )


def _part(result: dict[str, Any]) -> str:
    run = result["side_by_side"]
    versions: list[dict[str, str]] = list(run["versions"].values())
    store = versions[0]["store"] if versions else "?"
    kept = "append-only file, everysec" if run["durable"] else "no persistence"
    where = f"{_machine(result)}, {store}, {kept}."
    tables = render.markdown(run)
    if run["durable"]:
        return f"## With an append-only file\n\n{where}\n\n{tables}"
    return f"## Figures\n\n{where}\n\n{IMAGE}\n\n{tables}\n{_versions(run)}\n{_promises(run)}"


def _versions(run: dict[str, Any]) -> str:
    lines = ["### Versions", ""]
    said = set()
    for entry, found in run["versions"].items():
        line = ", ".join(f"{k} {v}" for k, v in found.items() if k != "store")
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

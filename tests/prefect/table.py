"""Write the table of Prefect's releases in docs/prefect.md, from a run of the tests: ``python -m tests.prefect.table``.

The tests start servers of the oldest, a middle and the newest release that is claimed. The table says of each release
and each test what was tried, and what happened. The program ends with the exit code of the tests.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree as ET

from tests.binaries.folders import ROOT
from tests.prefect.environment import MIDDLE, OLDEST, OTHER

PAGE = ROOT / "docs" / "prefect.md"
BEGIN, END = (
    f"<!-- releases: {word}, written by tests/prefect/table.py -->" for word in ("begin", "end")
)
TRIED = {
    "test_plugins_of_a_release": "a strict server whose plugins are not enabled does not start",
    "test_replicas_of_another_release": (
        "strict servers with the documented settings share a queue: "
        "20 runs of `task.delay()` at one replica are executed by a worker at the other; "
        "of 11 waiting runs of a killed replica each is delivered once, a delayed one at its time"
    ),
}
"""tests with a parameter that is a release, and what each of them tries"""


def run() -> tuple[int, dict[tuple[str, str], str]]:
    """Run the tests; return the exit code, and what happened for each test and release."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        names = " or ".join(TRIED)
        options = ["-q", "-m", "long or not long", "-k", names, f"--junitxml={report}"]
        code = subprocess.run(
            [sys.executable, "-m", "pytest", *options, "tests/prefect"], cwd=ROOT, check=False
        ).returncode
        seen = {}
        for case in ET.parse(report).iter("testcase"):  # noqa: S314 - the file is this program's own
            name, _, version = case.get("name", "").rstrip("]").partition("[")
            seen[name, version] = "failed" if case.find("failure") is not None else "passed"
    return code, seen


def table(seen: dict[tuple[str, str], str]) -> str:
    """Return the table in Markdown."""
    lines = [f"| tried | {OLDEST} | {MIDDLE} | {OTHER} |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {text} | "
        + " | ".join(seen.get((name, version), "not run") for version in (OLDEST, MIDDLE, OTHER))
        + " |"
        for name, text in TRIED.items()
    ]
    return "\n".join(lines)


def main() -> int:
    """Run the tests, and write the table between its marks."""
    code, seen = run()
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(seen)}\n\n{END}{rest.partition(END)[2]}")
    return code


if __name__ == "__main__":
    sys.exit(main())

"""The pipeline on Spark: how fast it reads, publishes and audits, the cost of the journal, and the accuracy of advice.

Each section of a round runs in a process of its own (`spark_section.py`), so that every Spark session is new, and a
section that fails does not affect the others.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import figures
import spark_sizes
import targets

_PROGRAM = Path(__file__).parent / "spark_section.py"
_PATIENCE = 1800.0
"""maximum seconds for one section"""


def measure(size: str, *, rounds: int | None = None) -> dict[str, Any]:
    """Run every section in every round; return the figures by name, each with its values, and the errors."""
    sizes = spark_sizes.SIZES[size]
    start = time.monotonic()
    values: dict[str, list[float]] = {}
    invalid: dict[str, str] = {}
    number = rounds or sizes.rounds
    for turn in range(1, number + 1):
        for section in spark_sizes.SECTIONS:
            print(f"round {turn} of {number}: spark, {section}", file=sys.stderr, flush=True)
            found = _section(section, size, turn)
            if isinstance(found, str):
                invalid[section] = found
                print(f"INVALID {section}: {found}", file=sys.stderr, flush=True)
                continue
            for name, more in found.items():
                values.setdefault(name, []).extend(more)
    return {
        "size": size,
        "rounds": number,
        "seconds": time.monotonic() - start,
        "figures": {name: {"median": median(v), "values": v} for name, v in values.items()},
        "invalid": invalid,
    }


def _section(section: str, size: str, turn: int) -> dict[str, list[float]] | str:
    words = [sys.executable, str(_PROGRAM), section, size, str(turn)]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=_PATIENCE, check=False
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"it took longer than {_PATIENCE:.0f} s"
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
        return said[-1]
    found: dict[str, list[float]] = json.loads(lines[-1])
    return found


def tables(run: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return the tables of a run, each as a title, a header and rows."""
    return figures.tables(run["figures"], targets.PIPELINE, "the pipeline")


def notes(run: dict[str, Any]) -> list[str]:
    """Return the notes on the tables."""
    said = [f"{run['size']} sizes; {run['rounds']} rounds; {run['seconds']:.0f} s in all"]
    return said + [f"INVALID: {section}: {why}" for section, why in run["invalid"].items()]

"""One section of what is measured of the pipeline: ``spark_section.py SECTION SIZE ROUND`` prints figures as JSON."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

# the audit's journals are made up by the tests' generator
sys.path.insert(0, str(Path(__file__).parent.parent))

import spark_sizes


def main(section: str, size: str, turn: str) -> None:
    """Measure; print one line of JSON: name to values."""
    if section not in spark_sizes.SECTIONS:
        raise SystemExit(f"no section {section}; there are: {', '.join(spark_sizes.SECTIONS)}")
    found = importlib.import_module(f"spark_{section}").measure(spark_sizes.SIZES[size], int(turn))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

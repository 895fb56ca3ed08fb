"""Run one section of the pipeline's benchmarks and print figures as JSON: ``spark_section.py SECTION SIZE ROUND``."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

# the generator of the tests creates the journals for the audit
sys.path.insert(0, str(Path(__file__).parent.parent))

import spark_sizes


def main(section: str, size: str, turn: str) -> None:
    """Run the section, and print the values by name as one line of JSON."""
    if section not in spark_sizes.SECTIONS:
        raise SystemExit(f"no section {section}; there are: {', '.join(spark_sizes.SECTIONS)}")
    found = importlib.import_module(f"spark_{section}").measure(spark_sizes.SIZES[size], int(turn))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

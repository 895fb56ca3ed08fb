"""Fetch every program that the tests run: `python -m tests.binaries`. What is there already takes no time."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from tests import binaries
from tests.binaries.folders import Unavailable
from tests.prefect.databases import tables
from tests.prefect.environment import other_prefect, python_with_prefect


def main() -> int:
    """Fetch everything, a few at a time; print what cannot be had. Return 1 if anything cannot."""
    makers = (
        lambda: tables(python_with_prefect()), other_prefect,
        binaries.chromium, binaries.postgres, binaries.node, binaries.c_compiler,
        lambda: list(binaries.store_servers()),
    )  # fmt: skip
    missing = 0
    with ThreadPoolExecutor() as pool:
        for future in [pool.submit(maker) for maker in makers]:
            try:
                future.result()
            except Unavailable as error:
                missing = 1
                print(error, file=sys.stderr)  # noqa: T201 - a command
    return missing


if __name__ == "__main__":
    sys.exit(main())

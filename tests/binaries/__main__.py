"""Download every program that the tests run: `python -m tests.binaries`. Existing programs are not downloaded again."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from tests import binaries
from tests.binaries.folders import Unavailable
from tests.prefect.databases import tables
from tests.prefect.environment import other_prefect, python_with_prefect


def main() -> int:
    """Download all programs, some at the same time.

    Print those that are not available, and return 1 if there are any.
    """
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
                print(error, file=sys.stderr)  # noqa: T201 - output of a command
    return missing


if __name__ == "__main__":
    sys.exit(main())

"""Every result beside a direct computation."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from taskqueue_cli.demo.job import measure
from taskqueue_cli.demo.plan import DemoPlan, File
from taskqueue_core.capabilities import Control

_CHUNK = 100
_THREADS = 4  # the work is reading, hashing and compressing, all of which let other threads run


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What came out."""

    compared: int = 0
    mismatches: tuple[str, ...] = ()
    """paths with a wrong result, or none"""
    changed: int = 0
    """files that were changed by somebody during the run, so that results differ for a reason"""
    unreadable: int = 0
    """files that neither side could read"""


async def compare(control: Control, plan: DemoPlan, advance: Callable[[int], None]) -> Comparison:
    """Compute every result again, here, and compare."""
    verdicts: list[str] = []
    mismatches: list[str] = []
    loop = asyncio.get_running_loop()
    threads = min(_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, "taskqueue-demo") as pool:
        try:
            for start in range(0, len(plan.files), _CHUNK):
                files = plan.files[start : start + _CHUNK]
                ids = [plan.task_id(index) for index in range(start, start + len(files))]
                results = await control.results(plan.key, *ids)
                verdicts += await asyncio.gather(
                    *(
                        loop.run_in_executor(pool, _compare_file, file, result)
                        for file, result in zip(files, results, strict=True)
                    )
                )
                advance(len(verdicts))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    mismatches = [
        file.path
        for file, verdict in zip(plan.files, verdicts, strict=True)
        if verdict == "mismatch"
    ]
    return Comparison(
        compared=len(verdicts),
        mismatches=tuple(mismatches),
        changed=verdicts.count("changed"),
        unreadable=verdicts.count("unreadable"),
    )


def _compare_file(file: File, result: bytes | None) -> str:
    expected = measure(file.path)
    if result is not None and msgspec.json.decode(result) == expected:
        return "unreadable" if "error" in expected else "equal"
    return "mismatch" if result is None or file.unchanged else "changed"

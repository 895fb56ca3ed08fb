"""Comparison of the stored result of every task with a result that is computed in this process."""

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
_THREADS = (
    4  # threads run in parallel here, because reading, hashing and compressing release the GIL
)


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of the results that were compared, by outcome."""

    compared: int = 0
    mismatches: tuple[str, ...] = ()
    """paths of the files whose result is wrong or missing"""
    changed: int = 0
    """number of files whose result differs because another program changed them during the run"""
    unreadable: int = 0
    """number of files that neither the worker nor this process could read"""


async def compare(control: Control, plan: DemoPlan, advance: Callable[[int], None]) -> Comparison:
    """Compute the result of every file in this process, and compare it with the result of its task.

    ``advance`` is called repeatedly with the number of results compared so far.
    """
    outcomes: list[str] = []
    pool = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "taskqueue-demo")
    try:
        for start in range(0, len(plan.files), _CHUNK):
            files = plan.files[start : start + _CHUNK]
            ids = [plan.task_id(index) for index in range(start, start + len(files))]
            results = await control.results(plan.key, *ids)
            outcomes += await asyncio.to_thread(list, pool.map(_compare_file, files, results))
            advance(len(outcomes))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    compared = zip(plan.files, outcomes, strict=True)
    return Comparison(
        compared=len(outcomes),
        mismatches=tuple(file.path for file, outcome in compared if outcome == "mismatch"),
        changed=outcomes.count("changed"),
        unreadable=outcomes.count("unreadable"),
    )


def _compare_file(file: File, result: bytes | None) -> str:
    expected = measure(file.path)
    if result is not None and msgspec.json.decode(result) == expected:
        return "unreadable" if "error" in expected else "equal"
    return "mismatch" if result is None or file.unchanged else "changed"

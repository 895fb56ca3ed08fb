"""Comparison of the stored result of every task with a result that is computed in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from taskqueue_cli.demo.job import measure
from taskqueue_cli.demo.plan import DemoPlan, File, file_at
from taskqueue_core.capabilities import Control

_CHUNK = 100


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The outcomes of comparing results."""

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
    for start in range(0, len(plan.files), _CHUNK):
        files = plan.files[start : start + _CHUNK]
        ids = [plan.task_id(index) for index in range(start, start + len(files))]
        pairs = zip(files, await control.results(plan.key, *ids), strict=True)
        outcomes += await asyncio.gather(
            *(asyncio.to_thread(_compare_file, *pair) for pair in pairs)
        )
        advance(len(outcomes))
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
    return "mismatch" if result is None or file == file_at(file.path) else "changed"

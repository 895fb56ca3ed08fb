"""Carrying lines between partitions by hand, in the order that a test wants."""

from __future__ import annotations

from collections.abc import Sequence

from taskqueue_core.capabilities import Dependencies, Line, LineKind, Report


async def carry(lines: Dependencies) -> int:
    """Carry lines until there are none, and return how many there were."""
    carried = 0
    while page := await lines.lines(100):
        await carry_some(lines, page)
        await lines.confirm(*page)
        carried += len(page)
    return carried


async def carry_some(lines: Dependencies, page: Sequence[Line]) -> None:
    """Carry lines without confirming them."""
    asked = [line for line in page if line.kind is LineKind.REGISTER]
    ended = [reported(line) for line in page if line.kind is LineKind.END]
    answers = await lines.register(*asked)
    await lines.release(*(each for each in answers if each is not None), *ended)
    for line in page:
        if line.kind is LineKind.CLOSE:
            await lines.tally(*await lines.seal(line.parent), sealed=True)
        elif line.count is not None:
            await lines.tally(line.count)


def reported(line: Line) -> Report:
    """Return what a line says about a parent."""
    assert line.child is not None
    return Report(
        parent=line.parent,
        child=line.child,
        entry=line.entry,
        state=line.state,
        version=line.version,
        result=line.result,
    )

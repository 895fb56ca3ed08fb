"""Numbers as readable text, and the marks on axes."""
# ruff: noqa: PLR2004 - the limits of units and the numbers of digits are clear where they are used

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

STEPS = (
    0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600,
    43_200, 86_400,
)  # fmt: skip
"""lengths in seconds that are readable as steps of a time axis"""
_DAY = 86_400
_NONE = "-"


def count(number: float | None) -> str:
    """Return a number as text without decimals: 1,234."""
    return _NONE if number is None else f"{number:,.0f}"


def short(number: float) -> str:
    """Return a number as short text for an axis: 0.5, 2,000, 15k, 3M."""
    for least, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(number) >= least:
            return f"{number / (1e3 if unit == 'k' else least):g}{unit}"
    return f"{number:,g}" if number == int(number) else f"{number:g}"


def seconds(number: float | None) -> str:
    """Return a duration as text: 0 s, 0.4 ms, 12 ms, 1.24 s, 2 m 05 s, 3 h 10 m, 2 d 04 h."""
    if number is None:
        return _NONE
    if number <= 0:
        return "0 s"
    if number < 0.999_5:
        digits = max(0, 1 - math.floor(math.log10(number * 1000))) if number < 0.01 else 0
        return f"{number * 1000:.{min(digits, 3)}f} ms"
    if number < 59.995:
        return f"{number:.{2 if number < 10 else 1}f} s"
    whole = round(number)
    for size, part, names in ((_DAY, 3600, "dh"), (3600, 60, "hm"), (60, 1, "ms")):
        if whole >= size:
            big, rest = divmod(whole, size)
            return f"{big:,} {names[0]} {rest // part:02} {names[1]}"
    return f"{number:.0f} s"


def brief(number: float) -> str:
    """Return a duration as short text for an axis: 0, 200 ms, 1.5 s, 20 s, 3 m, 2 h, 4 d."""
    for size, unit in ((_DAY, "d"), (3600, "h"), (60, "m"), (1, "s")):
        if number >= size and (number >= 3 * size or size == 1 or number % size == 0):
            return f"{round(number / size, 2):g} {unit}"
    return f"{round(number * 1000, 6):g} ms" if number else "0"


def rate(number: float | None) -> str:
    """Return a rate as text: per second, minute or hour. ``number`` is the rate per second."""
    if number is None:
        return _NONE
    for size, unit in ((1, "s"), (60, "min"), (3600, "h")):
        if number * size >= 1 or unit == "h":
            value = number * size
            return f"{value:,.0f}/{unit}" if value >= 10 else f"{value:.2g}/{unit}"
    return _NONE


def percent(number: float | None) -> str:
    """Return a share from 0 to 1 as text: 12 %, 0.3 %."""
    if number is None:
        return _NONE
    value = number * 100
    return f"{value:.0f} %" if value >= 10 or value in {0, 1} else f"{value:.2g} %"


def clock(moment: datetime | None, *, day: bool = True, fine: bool = False) -> str:
    """Return a time in UTC as text: with its date unless ``day`` is false, with milliseconds if ``fine``."""
    if moment is None:
        return _NONE
    moment = moment.astimezone(UTC)
    text = moment.strftime("%Y-%m-%d %H:%M:%S" if day else "%H:%M:%S")
    return f"{text}.{moment.microsecond // 1000:03}" if fine else text


def marks(top: float, most: int = 4) -> list[float]:
    """Return the marks of an axis from 0: at round numbers, the last one at ``top`` or above."""
    if top <= 0:
        return [0.0, 1.0]
    size = 10.0 ** math.floor(math.log10(top / most))
    step = next(part * size for part in (1, 2, 5, 10) if part * size * most >= top * (1 - 1e-9))
    number = math.ceil(top / step * (1 - 1e-9))
    return [round(index * step, 12) for index in range(number + 1)]


def time_marks(start: datetime, length: float, most: int = 6) -> Iterator[tuple[float, str]]:
    """Yield the marks of a time axis, each as the seconds from ``start`` and a label."""
    step = next((step for step in STEPS if length / step <= most), None)
    step = step or _DAY * math.ceil(length / (_DAY * most))
    form = "%H:%M:%S" if step < 60 else "%H:%M" if step < _DAY else "%d %b"
    base = start.timestamp()
    position = math.ceil(base / step - 1e-9) * step - base
    digits = 0 if step >= 1 else 1 if step >= 0.1 else 2
    while position <= length * (1 + 1e-9):
        moment = start + timedelta(seconds=position)
        text = moment.astimezone(UTC).strftime(form)
        if digits:
            text += f"{moment.microsecond / 1e6:.{digits}f}"[1:]
        yield position, text
        position += step

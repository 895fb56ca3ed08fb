"""Plots as SVG in an HTML page, whose style sheet defines their colours and fonts.

Each plot is drawn twice, for wide and for narrow screens, so that letters have the same size on both; the style sheet
shows one of the two. The title and the description of a plot contain its values as text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any
from zlib import crc32

import msgspec
from markupsafe import Markup, escape

from taskqueue_spark.report.numbers import clock, marks, short, time_marks

_WIDE, _NARROW = 960, 400
_BAR, _GAP = 22, 12
_DAY = 86_400
_LETTER = 6.8
"""approximate width of a letter, in pixels at a font size of 12"""
Text = Callable[[float], str]


class Series(msgspec.Struct, frozen=True):
    """A series with one value per window; ``None`` for a window without a value."""

    name: str
    values: Sequence[float | None]
    colour: int = 1
    """number of a colour in the style sheet"""
    area: bool = False


def over_time(
    title: str,
    about: str,
    series: Sequence[Series],
    *,
    start: datetime,
    step: float,
    unit: Text = short,
    half: bool = False,
) -> Markup:
    """Draw lines over time, with the value of each window (``step`` seconds) at its middle.

    ``half``: draw the plot for half the width of the page.
    """
    sizes = ((480 if half else _WIDE, 250, "wide"), (_NARROW, 230, "narrow"))
    return _both(title, about, sizes, lambda w, h: _lines(series, w, h, start, step, unit))


def _lines(  # noqa: PLR0917 - a private function may have the parameters of `over_time`
    series: Sequence[Series], width: int, height: int, start: datetime, step: float, unit: Text
) -> Iterator[str]:
    number = max((len(series.values) for series in series), default=0)
    known = [value for series in series for value in series.values if value is not None]
    ticks = marks(max(known, default=0))
    # The minimum width of 7 characters aligns the axes of most plots.
    remaining = 14 + _LETTER * max(7, *(len(unit(tick)) for tick in ticks))
    right, top, bottom = width - 12, 12, height - 26
    across = (right - remaining) / max(number * step, 1e-9)

    def y(value: float) -> float:
        return bottom - (bottom - top) * value / ticks[-1]

    for tick in ticks:
        kind = "axis" if tick == 0 else "grid"
        yield f'<line class="{kind}" x1="{remaining:.1f}" x2="{right}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        yield f'<text class="tick end" x="{remaining - 6:.1f}" y="{y(tick) + 4:.1f}">{escape(unit(tick))}</text>'
    for position, text in time_marks(start, number * step, 4 if width < _WIDE else 8):
        x = remaining + position * across
        if x + _LETTER * len(text) / 2 <= width:
            yield f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>'
            yield f'<text class="tick mid" x="{x:.1f}" y="{bottom + 18}">{escape(text)}</text>'
    for item in series:
        points = [
            None if value is None else (remaining + (index + 0.5) * step * across, y(value))
            for index, value in enumerate(item.values)
        ]
        for run in _runs(points):
            path = " ".join(f"{x:.1f},{at:.1f}" for x, at in run)
            if item.area:
                yield (
                    f'<polygon class="area c{item.colour}" '
                    f'points="{run[0][0]:.1f},{bottom} {path} {run[-1][0]:.1f},{bottom}"/>'
                )
            if len(run) == 1:
                yield f'<circle class="dot c{item.colour}" cx="{run[0][0]:.1f}" cy="{run[0][1]:.1f}" r="2.5"/>'
            else:
                yield f'<polyline class="line c{item.colour}" points="{path}"/>'
    for place in range(number):
        # A transparent area shows the values of its window as a tooltip.
        values = [(series.name, series.values[place]) for series in series]
        results = [f"{name} {unit(value)}" for name, value in values if value is not None]
        moment = clock(start + timedelta(seconds=place * step), day=step >= _DAY, fine=step < 1)
        x = remaining + place * step * across
        yield (
            f'<rect class="hit" x="{x:.1f}" y="{top}" width="{step * across:.2f}" height="{bottom - top}">'
            f"<title>{escape(moment)}\n{escape(chr(10).join(results) or 'nothing')}</title></rect>"
        )


def _runs(points: Sequence[tuple[float, float] | None]) -> Iterator[list[tuple[float, float]]]:
    """Yield the sequences of points between missing values."""
    run: list[tuple[float, float]] = []
    for point in [*points, None]:
        if point is not None:
            run.append(point)
        elif run:
            yield run
            run = []


def bars(title: str, rows: Sequence[tuple[str, float, str]], *, colour: int = 1) -> Markup:
    """Draw a bar per row, with its label above and its text at the end. A row has a label, a value and a text."""
    most = max((value for _, value, _ in rows), default=0) or 1
    pitch = _BAR + _GAP + 10

    def draw(width: int, _height: int) -> Iterator[str]:
        for index, (label, value, text) in enumerate(rows):
            y = index * pitch
            room = width - 24 - _LETTER * len(text)
            length = max(2.0, room * value / most) if value else 0
            yield f'<text class="label" x="0" y="{y + 12}">{_cut(label, width)}</text>'
            yield f'<rect class="bar c{colour}" x="0" y="{y + 18}" width="{length:.1f}" height="12" rx="2"/>'
            yield f'<text class="value" x="{length + 8:.1f}" y="{y + 28}">{escape(text)}</text>'

    height = len(rows) * pitch
    sizes = ((_WIDE, height, "wide"), (_NARROW, height, "narrow"))
    return _both(title, _about(rows), sizes, draw)


def ranges(
    title: str, rows: Sequence[tuple[str, Sequence[float], str]], *, unit: Text, colour: int = 1
) -> Markup:
    """Draw a bar from 0 to each value of a row (p50, p95, p99), the shortest bar darkest. All rows share an axis."""
    most = max((values[-1] for _, values, _ in rows if values), default=0)
    ticks = marks(most, 4)

    def draw(width: int, height: int) -> Iterator[str]:
        right = width - 14
        for tick in ticks:
            x = 2 + (right - 2) * tick / ticks[-1]
            anchor = "start" if tick == 0 else "end" if tick == ticks[-1] else "mid"
            yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{height - 20}"/>'
            yield f'<text class="tick {anchor}" x="{x:.1f}" y="{height - 5}">{escape(unit(tick))}</text>'
        for index, (label, values, text) in enumerate(rows):
            y = index * 40
            yield f'<text class="label" x="4" y="{y + 16}">{_cut(label, width)}</text>'
            for depth, value in sorted(enumerate(values), reverse=True):
                length = max(1.5, (right - 2) * value / ticks[-1])
                yield (
                    f'<rect class="range c{colour} d{depth}" x="2" y="{y + 22}" '
                    f'width="{length:.1f}" height="10" rx="2">'
                    f"<title>{escape(label)}\n{escape(text)}</title></rect>"
                )

    height = len(rows) * 40 + 28
    sizes = ((480, height, "wide"), (_NARROW, height, "narrow"))
    return _both(title, _about(rows), sizes, draw)


def _about(rows: Sequence[tuple[str, Any, str]]) -> str:
    return "; ".join(f"{label}: {text}" for label, _, text in rows)


def _cut(label: str, width: int) -> Markup:
    room = int(width / _LETTER) - 2
    cut = label if len(label) <= room else label[: room - 1] + "…"
    return Markup("{}<title>{}</title>").format(cut, label)


def _both(
    title: str,
    about: str,
    sizes: Sequence[tuple[int, int, str]],
    draw: Callable[[int, int], Iterator[str]],
) -> Markup:
    """Return a plot in two sizes, each given by its width, height and CSS class."""
    return Markup("").join(_svg(title, about, size, draw(*size[:2])) for size in sizes)


def _svg(title: str, about: str, size: tuple[int, int, str], parts: Iterator[str]) -> Markup:
    width, height, kind = size
    name = f"p{crc32(f'{title} {kind}'.encode('utf-8', 'replace')):08x}"
    return Markup(  # noqa: S704 - every text in this markup is escaped
        f'<svg class="plot {kind}" viewBox="0 0 {width} {height}" role="img" aria-labelledby="{name}t {name}d">'
        f'<title id="{name}t">{escape(title)}</title><desc id="{name}d">{escape(about)}</desc>'
        f"{''.join(parts)}</svg>"
    )

"""A dot chart as SVG, drawn without a library and readable on light and dark pages.

The chart uses dots, because on a logarithmic scale the length of a bar has no meaning. The colours are readable on
light and dark pages; text has the text colour of the page if the viewer supports this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import log10

WIDTH = 860
LEFT = 170
RIGHT = 150
ROW = 14
RADIUS = 5
GAP = 6
HEAD = 46
COLOURS = {"ours": "#2f81f7", "floor": "#8b949e", "peer": "#d4823a"}
STYLE = """text{font:12px system-ui,sans-serif;fill:#24292f}
.title{font-weight:600;font-size:13px}
line{stroke:#8b949e;stroke-opacity:.35}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}}"""


@dataclass(frozen=True, kw_only=True)
class Dot:
    """One row of a panel: a median, with the range of the values."""

    name: str
    kind: str
    value: float
    low: float
    high: float
    label: str


def chart(panels: Sequence[tuple[str, Sequence[Dot]]]) -> str:
    """Return an SVG image with one panel for each title, and dots on a logarithmic scale."""
    parts: list[str] = []
    top = 8
    for title, dots in panels:
        parts += _panel(title, dots, top)
        top += HEAD + len(dots) * (ROW + GAP) + 14
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" '
        f'width="{WIDTH}" height="{top}" role="img">'
    )
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>\n"])


def _panel(title: str, dots: Sequence[Dot], top: int) -> list[str]:
    first = int(log10(min(dot.low for dot in dots)) // 1)
    last = -int(-log10(max(dot.high for dot in dots)) // 1)
    bottom = top + HEAD + len(dots) * (ROW + GAP)

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (log10(value) - first) / max(1, last - first)

    parts = [f'<text class="title" x="8" y="{top + 14}">{escape(title)}</text>']
    for power in range(first, last + 1):
        at = f"{x(10.0**power):.1f}"
        parts.append(f'<line x1="{at}" x2="{at}" y1="{top + HEAD - 6}" y2="{bottom}"/>')
        parts.append(
            f'<text x="{at}" y="{top + HEAD - 10}" text-anchor="middle">{10.0**power:,g}</text>'
        )
    for row, dot in enumerate(dots):
        y = top + HEAD + row * (ROW + GAP)
        middle = y + ROW / 2
        end = f"{max(x(dot.value), x(dot.high)) + RADIUS + 6:.1f}"
        mark = f'<circle cx="{x(dot.value):.1f}" cy="{middle}" r="{RADIUS}"'
        lead = f'<line x1="{LEFT}" x2="{x(dot.value):.1f}" y1="{middle}" y2="{middle}"/>'
        span = f'<path d="M{x(dot.low):.1f} {middle}H{x(dot.high):.1f}"'
        parts += [
            f'<text x="{LEFT - 8}" y="{y + 11}" text-anchor="end">{escape(dot.name)}</text>',
            lead,
            f'{span} stroke="{COLOURS[dot.kind]}" stroke-width="2"/>',
            f'{mark} fill="{COLOURS[dot.kind]}"/>',
            f'<text x="{end}" y="{y + 11}">{escape(dot.label)}</text>',
        ]
    return parts

"""A chart of goodput as SVG, written by hand: one row for each trace, one mark for each way of saving."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

Row = tuple[str, Mapping[str, float]]
"""A trace's name, and what each way of saving keeps of the paid time, 0 to 1."""

LEFT, RIGHT, TOP, ROW, BOTTOM = 368, 30, 98, 24, 48
WIDTH = 1018

# Shape, colour and words of each way, in the order of the legend.
MARKS = {
    "50 min": ("circle", "#b8bcc4", "every 50 min"),
    "epoch": ("square", "#b8bcc4", "every epoch"),
    "10 min": ("circle", "#6b7280", "every 10 min"),
    "script": ("diamond", "#60a5fa", "cloudrun, blocking script"),
    "library": ("diamond", "#1d4ed8", "cloudrun, runner.training"),
    "perfect": ("bar", "#111827", "perfect"),
}


def chart(rows: Sequence[Row], title: str, note: str) -> str:
    """The picture. The scale begins at the tenth below the smallest value."""
    lowest = min(value for _, values in rows for value in values.values())
    scale = Scale(int(lowest * 10) / 10)
    height = TOP + ROW * len(rows) + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        text(16, 26, title, size=16),
        *legend(),
        *axis(scale, TOP + ROW * len(rows)),
        *(part for number, row in enumerate(rows) for part in line(row, TOP + ROW * number + ROW / 2, scale)),
        text(16, height - 10, note, colour="#6b7280", size=11),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


class Scale:
    """Where a share lies on the page: ``least`` at the left, 1 at the right."""

    def __init__(self, least: float) -> None:
        self.least = least

    def x(self, share: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (share - self.least) / (1.0 - self.least)

    def ticks(self) -> list[float]:
        apart = 0.05 if self.least >= 0.7 else 0.1
        count = round((1.0 - self.least) / apart)
        return [self.least + apart * number for number in range(count + 1)]


def legend() -> list[str]:
    parts = []
    for number, (shape, colour, words) in enumerate(MARKS.values()):
        x, y = 24 + 215 * (number % 3), 50 + 20 * (number // 3)
        parts += [mark(shape, colour, x, y - 4), text(x + 12, y, words)]
    return parts


def axis(scale: Scale, bottom: float) -> list[str]:
    parts = []
    for share in scale.ticks():
        x = scale.x(share)
        parts.append(f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{bottom}" stroke="#e5e7eb"/>')
        parts.append(text(x, bottom + 16, f"{share:.0%}", colour="#6b7280", anchor="middle"))
    return parts


def line(row: Row, y: float, scale: Scale) -> list[str]:
    name, values = row
    at = {way: scale.x(value) for way, value in values.items() if way in MARKS}
    rule = f'<line x1="{min(at.values()):.1f}" y1="{y}" x2="{max(at.values()):.1f}" y2="{y}" stroke="#d1d5db"/>'
    marks = [mark(*MARKS[way][:2], at[way], y) for way in MARKS if way in at]
    return [text(LEFT - 12, y + 4, name, anchor="end"), rule, *marks]


def mark(shape: str, colour: str, x: float, y: float) -> str:
    match shape:
        case "circle":
            return f'<circle cx="{x:.1f}" cy="{y}" r="4.5" fill="{colour}"/>'
        case "square":
            return f'<rect x="{x - 4:.1f}" y="{y - 4}" width="8" height="8" fill="{colour}"/>'
        case "diamond":
            return f'<path d="M {x:.1f} {y - 6} l 6 6 l -6 6 l -6 -6 z" fill="{colour}"/>'
        case _:
            return f'<rect x="{x - 1.5:.1f}" y="{y - 8}" width="3" height="16" fill="{colour}"/>'


def text(x: float, y: float, words: str, *, colour: str = "#111827", size: int = 12, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y}" fill="{colour}" font-size="{size}" text-anchor="{anchor}">{escape(words)}</text>'

"""Plots as SVG text, with no plotting library and no scripts.

Colours are CSS variables (``STYLE``), so a plot follows the reader's light or dark theme.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 34, 44
N_COLOURS = 7
CHARACTER_PX = 7.0
"""Width of a legend character at 12 px, on the generous side."""

STYLE = """
:root { --c0: #2563eb; --c1: #d97706; --c2: #0f9d74; --c3: #b13d8e; --c4: #7c5cd6; --c5: #64748b; --c6: #b45309;
  --ink: #1f2937; --soft: #6b7280; --grid: #e5e7eb; --paper: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --c0: #6ea8fe; --c1: #f0ab4a; --c2: #4fd1a5; --c3: #e58bc7; --c4: #b09df2; --c5: #94a3b8; --c6: #f59e0b;
    --ink: #e5e7eb; --soft: #9ca3af; --grid: #313a48; --paper: #161b22; } }
.plot text { font: 12px system-ui, -apple-system, "Segoe UI", "Liberation Sans", sans-serif; fill: var(--soft); }
.plot .legend { fill: var(--ink); } .plot .grid { stroke: var(--grid); stroke-width: 1; }
.plot .none { fill: var(--soft); } .plot .mark { stroke: var(--c1); stroke-width: 1; stroke-dasharray: 2 3; }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line. ``points`` are (x, y); ``faint`` draws it thin, ``dots`` marks each point."""

    name: str
    points: Iterable[tuple[float, float]]
    colour: int = 0
    faint: bool = False
    dots: bool = False
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values to pixels; ``ticks`` are (value, label)."""

    low: float
    high: float
    start_px: float
    end_px: float
    ticks: tuple[tuple[float, str], ...]

    def px(self, value: float) -> float:
        return self.start_px + (value - self.low) / (self.high - self.low) * (self.end_px - self.start_px)


def label(value: float) -> str:
    """A tick label: ``0.25``, ``1.5k``, ``2M``, ``1e-06``."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            scale = 1e3 if suffix == "k" else limit
            return f"{value / scale:.4g}{suffix}"
    return f"{value:.0e}" if 0 < abs(value) < 1e-3 else f"{value:.6g}"


def nice_step(span: float, count: int) -> float:
    """The smallest of 1, 2, 5 x 10^k that covers ``span`` in at most ``count`` steps."""
    power = 10.0 ** math.floor(math.log10(span / count))
    return next((m * power for m in (1, 2, 5) if m * power * count >= span * (1 - 1e-9)), 10 * power)


def linear_axis(
    low: float,
    high: float,
    start_px: float,
    end_px: float,
    *,
    count: int = 5,
    whole: bool = False,
    name: Callable[[float], str] = label,
) -> Axis:
    """Round ticks that cover [low, high]; ``whole``: only at whole numbers."""
    if high <= low:
        high = low + 1.0
    step = nice_step(high - low, count)
    step = max(1.0, step) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple((i * step, name(round(i * step, 12))) for i in range(first, last + 1))
    return Axis(first * step, last * step, start_px, end_px, ticks)


def line_chart(
    series: Sequence[Series],
    *,
    x_label: str,
    y_range: tuple[float, float] | None = None,
    log_y: bool = False,
    floor: float | None = None,
    marks: Sequence[float] = (),
) -> str:
    """Lines over a shared x. ``y_range`` fixes the axis, ``floor`` is a lowest y that is always shown.

    ``marks`` are x at which something happened to the whole run: thin vertical lines.

    A logarithmic axis has whole decades and omits values that are not positive. A chart without any point states that.
    """
    drawn = [(s, [(x, y) for x, y in s.points if math.isfinite(y) and (y > 0 or not log_y)]) for s in series]
    if log_y:
        drawn = [(s, [(x, math.log10(y)) for x, y in kept]) for s, kept in drawn]
    points = [p for _, kept in drawn for p in kept]
    if not points:
        return _frame([_text(WIDTH / 2, HEIGHT / 2, "nothing recorded", "middle", "none")])
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    low, high = y_range or (min(ys) if floor is None else min(floor, *ys), max(ys))
    x_axis = _x_axis(min(xs), max(xs))
    name = (lambda exponent: f"1e{exponent:.0f}") if log_y else label
    y_axis = linear_axis(low, high, HEIGHT - BOTTOM, TOP, whole=log_y, name=name)
    lines = [_line(s, [(x_axis.px(x), y_axis.px(y)) for x, y in kept]) for s, kept in drawn if kept]
    legend = [s for s, kept in drawn if s.name and kept]
    return _frame([_grid(x_axis, y_axis, x_label), _marks(x_axis, marks), *lines, _legend(legend)])


def _x_axis(low: float, high: float) -> Axis:
    """Steps or versions: ticks at whole numbers, the line fills the width."""
    ticks = linear_axis(low, high, 0, 1, count=8, whole=True).ticks
    high = max(high, low + 1)
    return Axis(low, high, LEFT, WIDTH - RIGHT, tuple(t for t in ticks if low <= t[0] <= high))


def _frame(parts: Sequence[str]) -> str:
    return f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


def _grid(x_axis: Axis, y_axis: Axis, x_label: str) -> str:
    parts = []
    for value, name in y_axis.ticks:
        y = y_axis.px(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 8, y + 4, name, "end"))
    parts += [_text(x_axis.px(value), HEIGHT - BOTTOM + 16, name, "middle") for value, name in x_axis.ticks]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_label, "middle"))
    return "".join(parts)


def _marks(x_axis: Axis, places: Sequence[float]) -> str:
    inside = [x_axis.px(place) for place in places if x_axis.low <= place <= x_axis.high]
    return "".join(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>' for x in inside)


def _legend(entries: Sequence[Series]) -> str:
    widths = [17 + len(entry.name) * CHARACTER_PX + 16 for entry in entries]
    wraps = LEFT + sum(widths) > WIDTH
    parts, x, y = [], float(LEFT), 5 if wraps else 12
    for entry, width in zip(entries, widths, strict=True):
        if wraps and x > LEFT and x + width > WIDTH:
            x, y = float(LEFT), y + 14  # there is room for two lines
        look = f"fill:var(--c{entry.colour % N_COLOURS})" + (";opacity:.4" if entry.faint else "")
        parts.append(f'<rect x="{x:.1f}" y="{y}" width="12" height="4" style="{look}"/>')
        parts.append(_text(x + 17, y + 6, entry.name, "start", "legend"))
        x += width
    return "".join(parts)


def _line(series: Series, pixels: Sequence[tuple[float, float]]) -> str:
    colour = f"var(--c{series.colour % N_COLOURS})"
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
    look = "stroke-width:1;opacity:.4" if series.faint else "stroke-width:2"
    look += ";stroke-dasharray:5 4" if series.dashed else ""
    parts = [f'<polyline points="{path}" style="fill:none;stroke:{colour};{look};stroke-linejoin:round"/>']
    if series.dots or len(pixels) == 1:
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" style="fill:{colour}"/>' for x, y in pixels]
    return "".join(parts)


def _text(x: float, y: float, content: str, anchor: str, kind: str = "") -> str:
    attribute = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{attribute}>{escape(content)}</text>'

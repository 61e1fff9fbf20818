"""Plots as SVG text: lines and stacked bars, with no plotting library and no scripts.

Colours are CSS variables (``STYLE``), so a plot follows the reader's light or dark theme.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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
    log: bool = False

    def px(self, value: float) -> float:
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        place = math.log10(max(value, self.low)) if self.log else value
        return self.start_px + (place - low) / (high - low) * (self.end_px - self.start_px)


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
    low: float, high: float, start_px: float, end_px: float, *, count: int = 5, whole: bool = False
) -> Axis:
    """An axis that starts and ends on ticks at round numbers; ``whole`` keeps to integers."""
    if high <= low:
        high = low + 1.0
    step = nice_step(high - low, count)
    step = max(1.0, step) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple((i * step, label(round(i * step, 12))) for i in range(first, last + 1))
    return Axis(first * step, last * step, start_px, end_px, ticks)


def log_axis(low: float, high: float, start_px: float, end_px: float) -> Axis:
    """A logarithmic axis over whole decades; ``low`` is positive."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    last = max(last, first + 1)
    every = 1 + (last - first) // 7
    ticks = tuple((10.0**e, f"1e{e}") for e in range(first, last + 1) if (e - first) % every == 0)
    return Axis(10.0**first, 10.0**last, start_px, end_px, ticks, log=True)


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

    A logarithmic axis omits values that are not positive. A chart without any point states that.
    """
    drawn = [(s, [p for p in s.points if math.isfinite(p[1]) and (p[1] > 0 or not log_y)]) for s in series]
    points = [p for _, kept in drawn for p in kept]
    if not points:
        return _frame([_nothing()])
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    low, high = y_range or (min(ys) if floor is None else min(floor, *ys), max(ys))
    x_axis = _x_axis(min(xs), max(xs))
    y_axis = (log_axis if log_y else linear_axis)(low, high, HEIGHT - BOTTOM, TOP)
    lines = [_line(s, [(x_axis.px(x), y_axis.px(y)) for x, y in kept]) for s, kept in drawn if kept]
    legend = [(s.name, s.colour, s.faint) for s, kept in drawn if s.name and kept]
    return _frame([_grid(x_axis, y_axis, x_label), _marks(x_axis, marks), *lines, _legend(legend)])


def stacked_bars(
    xs: Sequence[float], layers: Mapping[str, Sequence[float]], *, x_label: str, marks: Sequence[float] = ()
) -> str:
    """Bars at ``xs`` whose parts are the layers, bottom first."""
    if not xs or not layers:
        return _frame([_nothing()])
    y_axis = linear_axis(0, max(map(sum, zip(*layers.values()))), HEIGHT - BOTTOM, TOP)
    room = (WIDTH - LEFT - RIGHT) / len(xs)
    # Half a bar of room on both sides keeps the first and the last inside the frame.
    x_axis = _x_axis(xs[0], xs[-1], inset=room / 2)
    parts = [_grid(x_axis, y_axis, x_label)]
    below = [0.0] * len(xs)
    for colour, values in enumerate(layers.values()):
        for i, value in enumerate(values):
            top, bottom = y_axis.px(below[i] + value), y_axis.px(below[i])
            parts.append(_rect(x_axis.px(xs[i]) - room * 0.4, top, room * 0.8, bottom - top, colour))
            below[i] += value
    legend = _legend([(name, i, False) for i, name in enumerate(layers) if name])
    return _frame([*parts, _marks(x_axis, marks), legend])


def _x_axis(low: float, high: float, inset: float = 0.0) -> Axis:
    """Steps or versions: ticks at whole numbers, the line fills the width."""
    rounded = linear_axis(low, high, 0, 1, count=8, whole=True)
    high = max(high, low + 1)
    ticks = tuple(t for t in rounded.ticks if low <= t[0] <= high)
    return Axis(low, high, LEFT + inset, WIDTH - RIGHT - inset, ticks)


def _frame(parts: Sequence[str]) -> str:
    return f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


def _nothing() -> str:
    return _text(WIDTH / 2, HEIGHT / 2, "nothing recorded", "middle", "none")


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


def _legend(entries: Sequence[tuple[str, int, bool]]) -> str:
    widths = [17 + len(name) * CHARACTER_PX + 16 for name, _, _ in entries]
    wraps = LEFT + sum(widths) > WIDTH
    parts, x, y = [], float(LEFT), 5 if wraps else 12
    for (name, colour, faint), width in zip(entries, widths, strict=True):
        if wraps and x > LEFT and x + width > WIDTH:
            x, y = float(LEFT), y + 14  # there is room for two lines
        parts.append(_rect(x, y, 12, 4, colour, 0.4 if faint else 1.0))
        parts.append(_text(x + 17, y + 6, name, "start", "legend"))
        x += width
    return "".join(parts)


def _line(series: Series, pixels: Sequence[tuple[float, float]]) -> str:
    colour = f"stroke:var(--c{series.colour % N_COLOURS})"
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
    look = "stroke-width:1;opacity:.4" if series.faint else "stroke-width:2"
    look += ";stroke-dasharray:5 4" if series.dashed else ""
    parts = [f'<polyline points="{path}" style="fill:none;{colour};{look};stroke-linejoin:round"/>']
    if series.dots or len(pixels) == 1:
        fill = f"fill:var(--c{series.colour % N_COLOURS})"
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" style="{fill}"/>' for x, y in pixels]
    return "".join(parts)


def _rect(x: float, y: float, width: float, height: float, colour: int, opacity: float = 1.0) -> str:
    style = f"fill:var(--c{colour % N_COLOURS})" + (f";opacity:{opacity}" if opacity < 1 else "")
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{max(0.0, height):.1f}" style="{style}"/>'


def _text(x: float, y: float, content: str, anchor: str, kind: str = "") -> str:
    attribute = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{attribute}>{escape(content)}</text>'

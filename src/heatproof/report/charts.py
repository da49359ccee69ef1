"""Small charts as SVG text: drawn here, so that they print and can be read without a script.

Each has a title and a description for those who do not see it. Colours come from the page's style sheet by
class; what a colour says is also said by a dash, a shape or a word. Charts are small and many rather than
large and crowded: one method per panel, so that no legend has to be matched.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 260, 150
LEFT, RIGHT, TOP, BOTTOM = 34, 10, 10, 24
LONGEST = 26  # letters of a name
Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A name, its points (NaN: a gap) and the class of its style: one, two, or faint."""

    name: str
    points: Sequence[Point]
    style: str = "one"


@dataclass(frozen=True)
class Mark:
    """A numbered sign at a point, or at the foot of the chart where its height is NaN: an alarm."""

    at: Point
    text: str
    says: str


@dataclass(frozen=True)
class Axis:
    """From a number to a place: `low` to `high` over the pixels `start` to `stop`."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False
    ticks: Sequence[float] = field(default_factory=tuple)

    def __call__(self, value: float) -> float:
        low, high, value = (math.log10(v) for v in (self.low, self.high, value)) if self.log else (
            self.low, self.high, value,
        )  # fmt: skip
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.start + share * (self.stop - self.start), 1)


def line_panel(
    title: str,
    lines: Sequence[Line],
    ticks: Sequence[tuple[float, str]],
    bounds: tuple[float, float] = (0.0, 1.0),
    marks: Sequence[Mark] = (),
    describe: str = "",
) -> str:
    """Lines over one horizontal scale, whose ticks are given with their words."""
    x = Axis(ticks[0][0], ticks[-1][0], LEFT, WIDTH - RIGHT)
    y = Axis(*bounds, HEIGHT - BOTTOM, TOP)
    parts = [*_frame(y, nice_ticks(*bounds))]
    parts += [_text(x(at), HEIGHT - 8, word, _anchor(i, len(ticks))) for i, (at, word) in enumerate(ticks)]
    for line in lines:
        parts += _line(line, x, y)
    for mark in marks:
        parts.append(_alarm(x(mark.at[0]), y, mark))
    return _svg(title, describe or _description(lines), WIDTH, HEIGHT, parts)


def dot_rows(
    title: str, rows: Sequence[tuple[str, Sequence[tuple[str, float]], float]], describe: str
) -> str:
    """One row per name: a dot for each (word, value in [0, 1]) and a bar for the value over all."""
    width, step, left = 380, 30, 116
    height = step * len(rows) + 34
    x = Axis(0, 1, left, width - 14)
    parts = []
    for tick in (0, 0.25, 0.5, 0.75, 1):
        parts.append(f'<line class="grid" x1="{x(tick)}" x2="{x(tick)}" y1="6" y2="{height - 26}"/>')
        parts.append(_text(x(tick), height - 8, f"{tick:g}", "middle"))
    for k, (name, dots, overall) in enumerate(rows):
        y = 6 + step * (k + 0.5)
        parts.append(_text(left - 10, y + 4, short(name, 17), "end", "label"))
        known = [value for _, value in dots if not math.isnan(value)]
        if known:
            parts.append(f'<line class="span" x1="{x(min(known))}" x2="{x(max(known))}" y1="{y}" y2="{y}"/>')
        if not math.isnan(overall):
            parts.append(_shape("bar", x(overall), y, f"{name}, all classes: {overall:.3f}"))
        for i, (word, value) in enumerate(dots):
            if not math.isnan(value):
                beside = y + 5 * (i - (len(dots) - 1) / 2)  # so that equal values do not hide each other
                parts.append(
                    _shape(SHAPES[i % len(SHAPES)], x(value), beside, f"{name}, {word}: {value:.3f}")
                )
    return _svg(title, describe, width, height, parts)


def scatter(
    title: str, points: Sequence[tuple[str, float, float, bool]], x_word: str, y_word: str, describe: str
) -> str:
    """Named points (x on a log scale), True for those on the front, which a stepped line joins."""
    width, height, left, right = 420, 280, 46, 20
    xs, ys = [p[1] for p in points], [p[2] for p in points]
    low, high = min(xs) / 1.4, max(xs) * 2.2
    pad = (max(ys) - min(ys)) * 0.12 or 0.1
    x = Axis(low, high, left, width - right, log=True)
    y = Axis(min(ys) - pad, max(ys) + pad, height - 44, 22)
    parts = [*_frame(y, nice_ticks(y.low, y.high), left, width - right)]
    parts += [_text(x(t), height - 26, f"{t:g}", "middle") for t in decades(low, high)]
    parts.append(_text((left + width - right) / 2, height - 6, x_word, "middle"))
    parts.append(_text(4, 12, y_word, "start"))
    front = sorted((p[1], p[2]) for p in points if p[3])
    corners = [(x(a), y(b)) for a, b in front]
    path = "".join(
        f"{'M' if i == 0 else 'H'}{a}{f',{b}' if i == 0 else f'V{b}'}" for i, (a, b) in enumerate(corners)
    )
    if len(corners) > 1:
        parts.append(f'<path class="front" d="{path}"/>')
    taken: list[Point] = []
    for name, a, b, best in sorted(points, key=lambda p: p[2], reverse=True):
        at = x(a), y(b)
        says = f"{name}: {a:.3g} ms, {b:.3f}" + (", on the front" if best else "")
        parts.append(_shape("disc" if best else "ring", *at, says))
        down = next(d for d in (4, 16, 28, 40, 52, -8, -20, 64) if all(
            abs(at[1] + d - t[1]) > 10 or abs(at[0] - t[0]) > 90 for t in taken) or d == 64)  # fmt: skip
        taken.append((at[0], at[1] + down))
        after = at[0] < width * 0.7
        parts.append(
            _text(
                at[0] + (9 if after else -9), at[1] + down, short(name), "start" if after else "end", "label"
            )
        )
    return _svg(title, describe, width, height, parts)


def pareto(points: Sequence[tuple[str, float, float]]) -> list[tuple[str, float, float, bool]]:
    """Points with whether none is both cheaper (x) and better (y).

    >>> [p[3] for p in pareto([("a", 1, 1), ("b", 2, 2), ("c", 3, 1.5)])]
    [True, True, False]
    """

    def beaten(x: float, y: float) -> bool:
        return any(a <= x and b >= y and (a < x or b > y) for _, a, b in points)

    return [(name, x, y, not beaten(x, y)) for name, x, y in points]


def nice_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers between two bounds.

    >>> nice_ticks(0, 1), nice_ticks(-2.4, -1.1)
    ([0.0, 0.25, 0.5, 0.75, 1.0], [-2.0, -1.5])
    """
    span = high - low
    if not span > 0:
        return [low]
    power = 10 ** math.floor(math.log10(span))
    step = next(s * power for s in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0) if span / (s * power) < most)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 10) + 0.0 for k in range(first, math.floor(high / step + 1e-9) + 1)]


def decades(low: float, high: float) -> list[float]:
    """Ticks of a log scale: 1, 2, 5 of each power of ten, only powers where there are many.

    >>> decades(0.5, 30)
    [0.5, 1.0, 2.0, 5.0, 10.0, 20.0]
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [round(k * 10.0**p, 10) for p in powers for k in (1, 2, 5) if low <= k * 10.0**p <= high]
    return ticks if len(ticks) <= 7 else [t for t in ticks if math.log10(t) == round(math.log10(t))]


def short(name: str, most: int = LONGEST) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def shape_key(index: int) -> str:
    """The sign of one class, for the legend."""
    sign = _shape(SHAPES[index % len(SHAPES)], 7, 7, "")
    return f'<svg class="key" viewBox="0 0 14 14" width="14" height="14" aria-hidden="true">{sign}</svg>'


SHAPES = ("disc", "square", "triangle", "diamond", "ring")
_DRAW: dict[str, Callable[[float, float], str]] = {
    "disc": lambda x, y: f'<circle class="one" cx="{x}" cy="{y}" r="5"/>',
    "square": lambda x, y: f'<rect class="two" x="{x - 4.5:.1f}" y="{y - 4.5:.1f}" width="9" height="9"/>',
    "triangle": lambda x, y: f'<path class="three" d="M{x},{y - 5.5:.1f}l5.5,10h-11z"/>',
    "diamond": lambda x, y: f'<path class="four" d="M{x},{y - 6:.1f}l6,6l-6,6l-6,-6z"/>',
    "ring": lambda x, y: f'<circle class="hollow" cx="{x}" cy="{y}" r="4.5"/>',
    "bar": lambda x, y: f'<rect class="overall" x="{x - 1.5:.1f}" y="{y - 10:.1f}" width="3" height="20"/>',
}


def _shape(kind: str, x: float, y: float, says: str) -> str:
    title = f"<title>{escape(says)}</title>" if says else ""
    return f"<g>{title}{_DRAW[kind](x, y)}</g>"


def _svg(title: str, describe: str, width: float, height: float, parts: Sequence[str]) -> str:
    body = "".join(parts)
    number = hashlib.sha256(f"{title}|{describe}|{body}".encode()).hexdigest()[:8]
    names = f"chart-{number}-title chart-{number}-desc"
    return (
        f'<svg class="chart" role="img" viewBox="0 0 {width} {height}" aria-labelledby="{names}">'
        f'<title id="chart-{number}-title">{escape(title)}</title>'
        f'<desc id="chart-{number}-desc">{escape(describe)}</desc>{body}</svg>'
    )


def _frame(
    y: Axis, ticks: Sequence[float], left: float = LEFT, right: float = WIDTH - RIGHT
) -> Iterator[str]:
    for tick in ticks:
        yield f'<line class="grid" x1="{left}" x2="{right}" y1="{y(tick)}" y2="{y(tick)}"/>'
        yield _text(left - 6, y(tick) + 4, f"{tick:g}".replace("-", "−"), "end")


def _text(x: float, y: float, words: str, anchor: str = "start", style: str = "tick") -> str:
    return f'<text class="{style}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


def _anchor(place: int, total: int) -> str:
    return "middle" if 0 < place < total - 1 or total == 1 else "start" if place == 0 else "end"


def _line(line: Line, x: Axis, y: Axis) -> Iterator[str]:
    known = [(a, b) for a, b in line.points if not math.isnan(b)]
    if not known:
        return
    joined = " ".join(f"{x(a)},{y(b)}" for a, b in known)
    yield f'<polyline class="line {line.style}" points="{joined}"/>'
    if len(known) < 8:
        for a, b in known:
            place = f'cx="{x(a)}" cy="{y(b)}"'
            yield f'<circle class="dot {line.style}" {place} r="2.6"><title>{b:.3f}</title></circle>'


def _alarm(x: float, height: Axis, mark: Mark) -> str:
    dot, up, beside = "", HEIGHT - BOTTOM - 4.0, min(x, WIDTH - RIGHT - 6)
    if not math.isnan(mark.at[1]):
        y = height(mark.at[1])
        up = y - 9 if y > TOP + 18 else y + 15
        dot = f'<circle cx="{x}" cy="{y}" r="4.5"/>'
    return (
        f'<g class="alarm"><title>{escape(mark.says)}</title>{dot}'
        f'<text x="{beside:g}" y="{up:g}" text-anchor="middle">▲{escape(mark.text)}</text></g>'
    )


def _description(lines: Sequence[Line]) -> str:
    """Where each line begins and ends."""
    words = []
    for line in lines:
        known = [b for _, b in line.points if not math.isnan(b)]
        if known:
            words.append(f"{line.name}: {known[0]:.3f} to {known[-1]:.3f}")
    return "; ".join(words) or "no value is defined"

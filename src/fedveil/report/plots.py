"""Plots as small inline SVG: crisp at any size, and coloured by the page's own style sheet.

Nothing here uses green for a series: green means a sound promise, and only `pareto` and `evidence` draw one.
All text goes through `Markup.format`, so names are escaped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

WIDTH, HEIGHT = 480, 220
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 40
HUGE = 1e100
MOST_POINTS = 300  # a curve never has more: longer ones are thinned


@dataclass(frozen=True)
class Series:
    """A named curve; None leaves a gap. tone: colour number 1 to 6 of the style sheet."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    tone: int = 1
    dashed: bool = False


@dataclass(frozen=True)
class Point:
    """One run in the plane of result against epsilon; epsilon None stands for no sound promise."""

    name: str
    epsilon: float | None
    value: float


def short(value: float | None, digits: int = 3) -> str:
    """A number for axes and tables: significant digits, no trailing zeros."""
    if value is None or not math.isfinite(value):
        return "–"
    if value and not 1e-3 <= abs(value) < 1e6:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    text = f"{value:.{digits}g}"
    return f"{float(text):.0f}" if "e" in text else text


def ticks(low: float, high: float, count: int = 5, whole: bool = False) -> list[float]:
    """Round numbers (whole ones if asked for) from `low` to `high`."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * k for k in (1, 2, 5, 10) if unit * k >= raw * 0.999)
    step = max(1.0, step) if whole else step
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 per decade, thinned when there are many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(decades) <= 4 else (1,)
    return [f * 10.0**d for d in decades for f in factors if low * 0.999 <= f * 10.0**d <= high * 1.001]


def thin(series: Series) -> Series:
    """At most MOST_POINTS points, first and last kept; numbers that no axis can hold become gaps."""
    fine = [v if v is not None and abs(v) < HUGE else None for v in series.y]
    series = replace(series, y=fine)
    n = len(series.x)
    if n <= MOST_POINTS:
        return series
    chosen = sorted({round(i * (n - 1) / (MOST_POINTS - 1)) for i in range(MOST_POINTS)})
    return replace(series, x=[series.x[i] for i in chosen], y=[series.y[i] for i in chosen])


@dataclass(frozen=True)
class _Axes:
    """From values to picture coordinates."""

    x: tuple[float, float]
    y: tuple[float, float]
    log_x: bool = False
    log_y: bool = False
    height: int = HEIGHT
    whole: bool = False  # x has whole numbers only
    shown: tuple[float, float] | None = None  # where the x axis has numbers, if not everywhere

    def at_x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * _share(value, *self.x, self.log_x)

    def at_y(self, value: float) -> float:
        return TOP + (self.height - TOP - BOTTOM) * (1 - _share(value, *self.y, self.log_y))

    def draw(self, x_label: str, y_label: str, percent: bool = False, numbers: bool = True) -> Markup:
        parts = []
        bottom = self.height - BOTTOM
        for value in (log_ticks if self.log_y else ticks)(*self.y):
            text = f"{100 * value:.4g}%" if percent else short(value)
            parts.append(
                Markup(
                    '<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/><text x="{}" y="{:.1f}" '
                    'text-anchor="end">{}</text>'
                ).format(
                    LEFT,
                    WIDTH - RIGHT,
                    self.at_y(value),
                    self.at_y(value),
                    LEFT - 6,
                    self.at_y(value) + 4,
                    text,
                )
            )
        across = self.shown or self.x
        for value in (
            () if not numbers else log_ticks(*across) if self.log_x else ticks(*across, 8, self.whole)
        ):
            parts.append(
                Markup('<text x="{:.1f}" y="{}" text-anchor="middle">{}</text>').format(
                    self.at_x(value), bottom + 15, short(value)
                )
            )
        parts.append(
            Markup('<line class="axis" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(
                LEFT, WIDTH - RIGHT, bottom, bottom
            )
        )
        parts.append(
            Markup(
                '<text class="label" x="{}" y="{}" text-anchor="middle">{}</text>'
                '<text class="label" transform="rotate(-90)" x="{}" y="12" text-anchor="middle">{}</text>'
            ).format((LEFT + WIDTH - RIGHT) / 2, self.height - 5, x_label, -(TOP + bottom) / 2, y_label)
        )
        return Markup("").join(parts)


def _share(value: float, low: float, high: float, log: bool) -> float:
    if log:
        value, low, high = math.log(max(value, 1e-300)), math.log(low), math.log(high)
    return 0.5 if high == low else (value - low) / (high - low)


def _range(values: Sequence[float], log: bool, floor: float | None, top: float | None) -> tuple[float, float]:
    low, high = min(values), max(values)
    if log:
        return low / 1.15, high * 1.15
    pad = 0.06 * (high - low) or 0.06 * abs(high) or 0.5
    low, high = low - pad if floor is None else min(floor, low), high + pad
    return low, high if top is None else min(high, max(top, max(values)))


def lines(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str = "round",
    y_label: str,
    percent: bool = False,
    floor: float | None = None,
    top: float | None = None,
    diagonal: bool = False,
    hline: tuple[float, str] | None = None,
) -> Markup:
    """Curves over a common axis, or nothing if there is no finite value. Large ranges become logarithmic."""
    series = [s for s in map(thin, series) if any(v is not None for v in s.y)]
    values = [v for s in series for v in s.y if v is not None]
    if not values:
        return Markup("")
    if hline:
        values.append(hline[0])
    log = not percent and min(values) > 1 / HUGE and max(values) > 60 * min(values)
    xs = [x for s in series for x in s.x]
    whole = all(x == int(x) for x in xs) and not diagonal
    axes = _Axes((min(xs), max(xs)), _range(values, log, None if log else floor, top), log_y=log, whole=whole)
    body = [axes.draw(x_label, y_label, percent)]
    if diagonal:
        body.append(
            Markup('<line class="guide" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>').format(
                axes.at_x(0), axes.at_y(0), axes.at_x(1), axes.at_y(1)
            )
        )
    if hline:
        body.append(
            Markup(
                '<line class="guide" x1="{}" x2="{}" y1="{y:.1f}" y2="{y:.1f}"/><text x="{}" y="{t:.1f}">{}</text>'
            ).format(
                LEFT, WIDTH - RIGHT, LEFT + 4, hline[1], y=axes.at_y(hline[0]), t=axes.at_y(hline[0]) - 4
            )
        )  # fmt: skip
    for s in series:
        body.append(_path(s, axes))
    hover = {
        "box": [LEFT, TOP, WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM],
        "x": [axes.x[0], axes.x[1]],
        "label": x_label,
        "series": [
            {"name": s.name, "x": list(s.x), "y": [_word(v, percent) for v in s.y], "tone": s.tone}
            for s in series
        ],
    }
    ends = "; ".join(f"{s.name}: {_ends(s, percent)}" for s in series)
    return _figure(title, f"{title}. {ends}", HEIGHT, Markup("").join(body), _legend(series), hover)


def _word(value: float | None, percent: bool) -> str | None:
    return None if value is None else f"{100 * value:.2f}%" if percent else short(value, 4)


def _ends(series: Series, percent: bool) -> str:
    known = [_word(v, percent) for v in series.y if v is not None]
    return f"{known[0]} to {known[-1]}"


def _path(series: Series, axes: _Axes) -> Markup:
    """Line segments between gaps; a single point becomes a dot."""
    pieces: list[list[str]] = [[]]
    for x, y in zip(series.x, series.y, strict=False):
        if y is None:
            pieces.append([])
        else:
            pieces[-1].append(f"{axes.at_x(x):.1f},{axes.at_y(y):.1f}")
    style = f"tone{series.tone}" + (" dashed" if series.dashed else "")
    out = []
    for piece in pieces:
        if len(piece) == 1:
            x_text, y_text = piece[0].split(",")
            out.append(Markup('<circle class="dot {}" cx="{}" cy="{}" r="3"/>').format(style, x_text, y_text))
        elif piece:
            out.append(Markup('<polyline class="curve {}" points="{}"/>').format(style, " ".join(piece)))
    return Markup("").join(out)


def _legend(series: Sequence[Series]) -> Markup:
    if len(series) < 2:
        return Markup("")
    items = [
        Markup(
            '<li><svg width="22" height="8" aria-hidden="true"><line class="curve tone{}{}" x1="1" x2="21" y1="4" y2="4"/>'
            "</svg>{}</li>"
        ).format(s.tone, " dashed" if s.dashed else "", s.name)
        for s in series
    ]
    return Markup('<ul class="legend">{}</ul>').format(Markup("").join(items))


def _figure(
    title: str, words: str, height: int, body: Markup, legend: Markup = Markup(""), hover: object = None
) -> Markup:
    data = Markup(' data-hover="{}"').format(json.dumps(hover, allow_nan=False)) if hover else Markup("")
    return Markup(
        '<figure class="chart"{}><figcaption>{}</figcaption><svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}'
        "</svg>{}</figure>"
    ).format(data, title, WIDTH, height, words, body, legend)


def pareto(points: Sequence[Point], *, value: str, observer: str, percent: bool = True) -> Markup:
    """Result against sound epsilon. Runs without a sound promise stand in a lane of their own, hollow and red."""
    if not points:
        return Markup("")
    known = [p.epsilon for p in points if p.epsilon]
    low, high = (min(known) / 2, max(known) * 2) if known else (0.5, 10.0)
    lane = high * (high / low) ** 0.22
    axes = _Axes(
        (low, lane * (high / low) ** 0.12), _range([p.value for p in points], False, None, 1.0 if percent else None),
        log_x=True, height=280, shown=(low, high),
    )  # fmt: skip
    edge = axes.at_x(high * (high / low) ** 0.06)
    bottom = axes.height - BOTTOM
    body = [
        Markup('<rect class="lane" x="{:.1f}" y="{}" width="{:.1f}" height="{}"/>').format(
            edge, TOP, WIDTH - RIGHT - edge, bottom - TOP
        )
    ]
    body.append(axes.draw(f"sound epsilon for the {observer} (smaller is more private)", value, percent))
    body.append(
        Markup('<text class="warn" x="{:.1f}" y="{}" text-anchor="middle">no sound promise</text>').format(
            (edge + WIDTH - RIGHT) / 2, bottom + 15
        )
    )
    taken: list[tuple[float, float]] = []
    for p in points:
        x, y = axes.at_x(p.epsilon if p.epsilon else lane), axes.at_y(p.value)
        text_y = y - 9
        while any(abs(text_y - b) < 13 and abs(x - a) < 120 for a, b in taken):
            text_y += 13
        taken.append((x, text_y))
        anchor = "end" if x > WIDTH - 110 else "start" if x < LEFT + 60 else "middle"
        says = f"{p.name}: {_word(p.value, percent)}, " + (
            f"sound epsilon {short(p.epsilon)}" if p.epsilon else "no sound promise"
        )
        body.append(
            Markup(
                '<circle class="run {}" cx="{:.1f}" cy="{:.1f}" r="5"><title>{}</title></circle>'
                '<text class="name" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>'
            ).format("sound" if p.epsilon else "none", x, y, says, x, text_y, anchor, _clip(p.name))
        )
    words = "; ".join(
        f"{p.name}: {_word(p.value, percent)} at "
        + (f"epsilon {short(p.epsilon)}" if p.epsilon else "no sound promise")
        for p in points
    )
    return _figure(f"{value.capitalize()} against promise", words, axes.height, Markup("").join(body))


def _clip(text: str, most: int = 28) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def confusion(matrix: Sequence[Sequence[int]], names: Sequence[str] = ()) -> Markup:
    """Rows: the true class; columns: what the model said; darker means more of the row."""
    n = len(matrix)
    if not n:
        return Markup("")
    cell = max(8, min(34, 360 // n))
    left, top = 64, 22
    size = left + n * cell + 10
    labels = list(names) or [str(i) for i in range(n)]
    body = []
    for i, row in enumerate(matrix):
        total = sum(row) or 1
        for j, count in enumerate(row):
            share = count / total
            body.append(
                Markup(
                    '<rect class="{}" x="{}" y="{}" width="{}" height="{}" fill-opacity="{:.3f}"><title>{}</title></rect>'
                ).format(
                    "hit" if i == j else "miss", left + j * cell, top + i * cell, cell - 1, cell - 1,
                    0.04 + 0.96 * share, f"true {labels[i]}, said {labels[j]}: {count} of {total} ({100 * share:.1f}%)",
                )
            )  # fmt: skip
            if cell >= 26 and count:
                body.append(
                    Markup('<text class="cell{}" x="{}" y="{}" text-anchor="middle">{}</text>').format(
                        " on" if share > 0.5 else "",
                        left + j * cell + cell / 2,
                        top + i * cell + cell / 2 + 4,
                        count,
                    )
                )
        if cell >= 12 or i % 5 == 0:
            body.append(
                Markup(
                    '<text x="{}" y="{}" text-anchor="end">{}</text>'
                    '<text x="{}" y="{}" text-anchor="middle">{}</text>'
                ).format(
                    left - 6, top + i * cell + cell / 2 + 4, labels[i],
                    left + i * cell + cell / 2, top + n * cell + 14, labels[i],
                )
            )  # fmt: skip
    middle = top + n * cell / 2
    body.append(
        Markup(
            '<text class="label" x="{}" y="{}" text-anchor="middle">what the model said</text>'
            '<text class="label" transform="rotate(-90)" x="{}" y="14" text-anchor="middle">true class</text>'
        ).format(left + n * cell / 2, top + n * cell + 30, -middle)
    )
    right = sum(matrix[i][i] for i in range(n))
    total = sum(map(sum, matrix))
    return Markup(
        '<figure class="chart confusion"><figcaption>Which classes it confuses (test data)</figcaption>'
        '<svg viewBox="0 0 {} {}" width="{}" role="img" aria-label="{}">{}</svg></figure>'
    ).format(
        size, top + n * cell + 38, size, f"confusion matrix, {right} of {total} right", Markup("").join(body)
    )


def bars(values: Sequence[tuple[str, float]], *, title: str, label: str) -> Markup:
    """Sorted bars, one per client, to show a spread."""
    values = sorted(values, key=lambda item: item[1])[:MOST_POINTS]
    if not values:
        return Markup("")
    axes = _Axes((0, len(values)), _range([v for _, v in values], False, 0.0, None))
    wide = (WIDTH - LEFT - RIGHT) / len(values)
    zero = axes.at_y(max(0.0, axes.y[0]))
    body = [axes.draw("clients, sorted", label, numbers=False)]
    for i, (name, value) in enumerate(values):
        y = axes.at_y(value)
        body.append(
            Markup(
                '<rect class="bar" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"><title>{}</title></rect>'
            ).format(
                LEFT + i * wide + 0.1 * wide,
                min(y, zero),
                0.8 * wide,
                abs(zero - y),
                f"client {name}: {short(value, 4)}",
            )
        )
    return _figure(
        title, f"{title}: from {short(values[0][1])} to {short(values[-1][1])}", HEIGHT, Markup("").join(body)
    )


def evidence(lower: float, promised: float | None, ceiling: float | None, sound: bool) -> Markup:
    """The attack's lower bound under the promised upper bound, on one scale."""
    known = [v for v in (lower, promised, ceiling) if v is not None and math.isfinite(v)]
    top = 1.15 * max(*known, 0.1)
    height, y = 92, 38
    axes = _Axes((0.0, top), (0, 1), height=height)
    body = [
        Markup('<rect class="track" x="{}" y="{}" width="{}" height="12"/>').format(
            LEFT, y, WIDTH - LEFT - RIGHT
        ),
        Markup('<rect class="proof" x="{}" y="{}" width="{:.1f}" height="12"/>').format(
            LEFT, y, max(axes.at_x(lower) - LEFT, 1.5)
        ),
        Markup('<text x="{}" y="{}" text-anchor="end">ε</text>').format(LEFT - 8, y + 10),
        Markup('<text x="{:.1f}" y="{}">{}</text>').format(
            LEFT, y + 30, f"shown by the audit: at least {short(lower)}"
        ),
    ]
    if promised is not None:
        x = axes.at_x(promised)
        broken = lower > promised
        kind = "none" if broken else "sound" if sound else "nominal"
        body.append(
            Markup(
                '<line class="mark {}" x1="{x:.1f}" x2="{x:.1f}" y1="{}" y2="{}"/><text class="name" x="{x:.1f}" y="{}" '
                'text-anchor="{}">{}</text>'
            ).format(
                kind, y - 8, y + 20, y - 14, "end" if x > WIDTH * 0.6 else "start",
                f"promised: at most {short(promised)}" + ("" if sound else " (nominal)"), x=x,
            )
        )  # fmt: skip
    if ceiling is not None and math.isfinite(ceiling):
        x = axes.at_x(ceiling)
        body.append(
            Markup(
                '<line class="guide" x1="{x:.1f}" x2="{x:.1f}" y1="{}" y2="{}"/><text x="{x:.1f}" y="{}" text-anchor="end">'
                "{}</text>"
            ).format(y - 4, y + 32, y + 44, f"most that so few canaries could show: {short(ceiling)}", x=x)
        )
    return _figure("Promise and proof on one scale", "audit", height, Markup("").join(body))

"""Figures as SVG that lie in the page itself: no script, colours by the page's style.

matplotlib draws them. Each figure is drawn twice, for a wide and for a narrow page, so that text
keeps its size; the page's style shows one of the two. Colours are placeholders that become
variables of the style sheet, which has a set for light and one for dark.
"""

from __future__ import annotations

import io
import re
import textwrap
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from keyfront.common import programs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Inches, at 72 points each.
WIDE, NARROW = (7.6, 3.4), (3.5, 3.1)

# Colours that occur nowhere else, and what the style sheet calls them.
INK, FAINT = "#000011", "#000012"
SERIES = tuple(f"#0000{number}" for number in range(21, 29))
GOOD, BAD, EVEN = "#000031", "#000032", "#000033"
_NAMES = {
    INK: "--ink",
    FAINT: "--faint",
    GOOD: "--good",
    BAD: "--bad",
    EVEN: "--even",
    **{color: f"--s{place + 1}" for place, color in enumerate(SERIES)},
}
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
# The same, for the legend in the page.
BAR, LINE = "■", "━"
GLYPHS = ("●", "■", "▲", "◆", "▼", "✚", "✖", "★")


class Key(NamedTuple):
    """A line of a legend.

    :param place: the index of the series whose colour it has
    :param glyph: the mark before it, as in the figure
    """

    label: str
    place: int
    glyph: str


class Drawn(NamedTuple):
    """A figure, ready for the page.

    :param title: the thing that it shows, in a line
    :param caption: a line that a reader must know; empty for nothing
    """

    title: str
    wide: str
    narrow: str
    legend: list[Key]
    caption: str = ""


def draw(
    title: str,
    plot: Callable[[Figure, bool], None],
    *,
    legend: Sequence[Key] = (),
    caption: str = "",
    heights: tuple[float, float] = (WIDE[1], NARROW[1]),
) -> Drawn:
    """Draw a figure for wide and for narrow pages.

    :param plot: draws on an empty figure; its second argument says whether it is the narrow one
    :param heights: the heights in inches, wide and narrow
    """
    wide, narrow = (
        _svg(plot, (width, height), width == NARROW[0], f"{title} {width}")
        for width, height in zip((WIDE[0], NARROW[0]), heights, strict=True)
    )
    return Drawn(title, wide, narrow, list(legend), caption)


def _svg(
    plot: Callable[[Figure, bool], None], size: tuple[float, float], narrow: bool, salt: str
) -> str:
    programs.require_module("matplotlib", "experiments")
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {
        # text stays text: it can be read out, searched and selected
        "svg.fonttype": "none",
        # ids and so the file are the same for the same figure
        "svg.hashsalt": salt,
        "font.family": "sans-serif",
        "font.size": 8.5,
        "axes.edgecolor": FAINT,
        "axes.labelcolor": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": FAINT,
        "grid.linewidth": 0.4,
        "grid.alpha": 0.5,
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "lines.linewidth": 1.6,
        "lines.markersize": 4.5,
        "hatch.linewidth": 0.5,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        figure.patch.set_alpha(0)
        plot(figure, narrow)
        for axes in figure.axes:
            axes.patch.set_alpha(0)
            axes.set_axisbelow(True)
        out = io.StringIO()
        figure.savefig(
            out, format="svg", metadata={"Date": None, "Creator": None}, transparent=True
        )
    return _for_page(out.getvalue(), salt)


def _for_page(text: str, salt: str) -> str:
    """Return the drawing in the page's colours and fonts, its ids unlike other figures'."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' (?:width|height)="[\d.]+pt"', "", text, count=2)
    for color, name in _NAMES.items():
        text = text.replace(color, f"var({name})")
    # matplotlib names fonts it measured with; the page's own is as wide or narrower
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px var(--font)", text)
    # text without a colour of its own is black, also in the dark
    text = re.sub(r'(<text [^>]*style=")(?![^"]*fill:)', r"\1fill: var(--ink); ", text)
    prefix = f"f{zlib.crc32(salt.encode()):x}-"
    text = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}\1"', text)
    text = re.sub(r'(href=")#', rf"\1#{prefix}", text)
    text = text.replace("url(#", f"url(#{prefix}")
    return text.replace("<svg ", '<svg aria-hidden="true" focusable="false" ', 1)


def folded(text: str, width: int) -> str:
    """Return a label on as many lines as it needs."""
    return "\n".join(textwrap.wrap(text, width))


def tall(labels: Sequence[str], widths: tuple[int, int]) -> tuple[float, float]:
    """Inches, wide and narrow, for a figure with a line for each label.

    :param widths: characters that a label has on a line, wide and narrow
    """
    found = []
    for width in widths:
        most = max((folded(label, width).count("\n") + 1 for label in labels), default=1)
        found.append(0.75 + len(labels) * max(0.14 * most + 0.07, 0.24))
    return found[0], found[1]


def plain_log(axes: Axes, which: str) -> None:
    """Plain numbers on a logarithmic axis, ``x`` or ``y``."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axis.get_data_interval()
    if low > 0 and high / low < 30:
        # whole decades would leave an axis with one number, or none
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())

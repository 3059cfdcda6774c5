"""Figure style: one colour, dash and marker for each stage; rendering to SVG and PNG, wide and narrow.

Colours are those of Okabe and Ito, which people with colour-blindness tell apart; backprop is always the near
black. More stages than colours are drawn along viridis. Dashes and markers carry the same information again.
Figures are always on white, so a page shows them on a white card in the dark too.

Figures are made and rendered inside `style()`. It sets matplotlib's settings for that time and puts them
back; they are settings of the process, so two threads must not draw at once. The same data gives the same
bytes with the same matplotlib.
"""

import io
import math
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import matplotlib
import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedFormatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from topograd.report.data import Array

INK = "#1d2433"
MUTED = "#5d6779"
GRID = "#e6e9ef"
BACKPROP = "#1d2433"
WIDTH, NARROW = 8.0, 4.2  # inches, of every figure: so that text has one size on the page, and on a phone's
MAX_POINTS = 600  # of a raw curve; more cannot be seen and make the page heavy
MAX_TEXTS = 16  # bars that still have room for their values

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b5578f", "#d99100", "#3f9fd8")
_DASHES: tuple[Any, ...] = ("-", (0, (6, 1.5)), (0, (6, 1.5, 1.2, 1.5)), (0, (1.5, 1.2)))
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_MARKERS = ("o", "s", "^", "X", "v", "P")

_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": "#b9c0cc",
    "axes.labelcolor": MUTED,
    "axes.labelsize": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.formatter.useoffset": False,
    "axes.unicode_minus": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": "#b9c0cc",
    "ytick.color": "#b9c0cc",
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "ytick.major.size": 0,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "legend.handlelength": 2.6,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "savefig.dpi": 160,
    "svg.fonttype": "path",
    "svg.hashsalt": "topograd",
}


@dataclass(frozen=True)
class Look:
    """How one stage is drawn, in every figure."""

    colour: str
    dash: Any
    marker: str


def look(stage: int, stages: int) -> Look:
    """The look of stage number `stage`, from 0, among `stages`."""
    if stages <= len(_COLOURS):
        colour = _COLOURS[stage]
    else:
        colour = to_hex(matplotlib.colormaps["viridis"](0.88 * stage / (stages - 1)))
    return Look(colour, _DASHES[stage % len(_DASHES)], _MARKERS[stage % len(_MARKERS)])


@dataclass(frozen=True)
class Bar:
    """One bar of a bar chart: its name below, its height, and the text at its end."""

    label: str
    height: float
    colour: str
    text: str


@contextmanager
def style() -> Iterator[None]:
    """Draw inside this: matplotlib's own defaults and then ours, whatever the user's settings are."""
    with matplotlib.style.context(_STYLE, after_reset=True):
        yield


def new_figure(height: float) -> Figure:
    """An empty figure whose parts move aside for one another."""
    return Figure(figsize=(WIDTH, height), layout=_layout())


def _layout() -> ConstrainedLayoutEngine:
    return ConstrainedLayoutEngine(w_pad=0.09, h_pad=0.08)


def panels(figure: Figure, count: int, *, stacked: bool = False, **options: Any) -> list[Axes]:
    """`count` axes in one row, or stacked in one column."""
    lines, columns = (count, 1) if stacked else (1, count)
    return list(figure.subplots(lines, columns, squeeze=False, **options).flat)


def legend_below(figure: Figure, axes: Axes) -> None:
    """One legend for the figure, from the entries of one of its axes, under everything else."""
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:
        _legend(figure, handles, labels, 88)


def _legend(figure: Figure, handles: list[Any], labels: list[str], fitting: int) -> None:
    """A legend below the figure, about so many characters of which fit its width."""
    columns = max(1, fitting // (max(map(len, labels)) + 8))
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), columns))


def whole_steps(axes: Axes) -> None:
    """Ticks at whole steps only, however short the run."""
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    axes.set_xlabel("step")


def powers(axes: Axes, side: str) -> None:
    """A logarithmic scale for "x" or "y" whose labels are plain text, as all text here."""
    axis = axes.xaxis if side == "x" else axes.yaxis
    axes.set(**{f"{side}scale": "log"})
    axis.set_major_locator(LogLocator(numticks=8))
    axis.set_major_formatter(FuncFormatter(lambda value, place: _power(value)))
    axis.set_minor_formatter(NullFormatter())


def _power(value: float) -> str:
    """1000 as itself, 1e-12 as 10⁻¹²."""
    if 1e-3 <= value <= 1e3:
        return f"{value:g}"
    return "10" + f"{math.log10(value):.0f}".translate(_RAISED)


def bars(axes: Axes, drawn: list[Bar], slots: int) -> None:
    """Bars from zero, each with its text at its end, in at least `slots` places so that few stay slim.

    Where there are more than `MAX_TEXTS` bars, texts are left out and names thinned. Callers may raise the
    upper limit but need not: there is room for the texts.
    """
    heights = [bar.height for bar in drawn]
    axes.bar(range(len(drawn)), heights, width=0.6, color=[bar.colour for bar in drawn])
    for place, bar in enumerate(drawn if len(drawn) <= MAX_TEXTS else ()):
        down = bar.height < 0
        axes.annotate(
            bar.text,
            (place, bar.height),
            (0, -4 if down else 4),
            textcoords="offset points",
            ha="center",
            va="top" if down else "bottom",
            fontsize=9.5 if len(drawn) <= 8 else 8,
        )
    low, high = min(0.0, *heights), max(0.0, *heights)
    room = 0.16 * (high - low) or 1.0
    axes.set_ylim(low - room if low < 0 else 0, high + room)
    margin = max(slots - len(drawn), 0) / 2 + 0.5
    axes.set_xlim(-margin, len(drawn) - 1 + margin)
    stride = -(-len(drawn) // MAX_TEXTS)
    last = len(drawn) - 1
    shown = [*range(0, last - stride + 1, stride), last]
    axes.set_xticks(shown, [drawn[place].label for place in shown])
    axes.grid(axis="x", visible=False)
    axes.tick_params(axis="x", length=0)
    if low < 0:
        axes.axhline(0, color=MUTED, linewidth=0.8)


def thin(steps: Array, values: Array) -> tuple[Array, Array]:
    """Every j-th point, the last included, so that at most `MAX_POINTS` remain."""
    stride = -(-len(steps) // MAX_POINTS) or 1
    start = (len(steps) - 1) % stride
    return steps[start::stride], values[start::stride]


class Drawing(NamedTuple):
    """A rendered figure: SVG text, PNG bytes, and SVG text for a narrow screen."""

    svg: str
    png: bytes
    narrow: str


def render(figure: Figure) -> Drawing:
    """The figure without dates or names of programs; afterwards it has its narrow layout."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # laid out once for both formats
    svg, png = _svg(figure), io.BytesIO()
    figure.savefig(png, format="png", metadata={"Software": None})
    _make_narrow(figure)
    return Drawing(svg, png.getvalue(), _svg(figure))


def _svg(figure: Figure) -> str:
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return file.getvalue().decode()


def _make_narrow(figure: Figure) -> None:
    """Stack axes that stand side by side, two in a line where there were more; wrap long labels."""
    axes = [each for each in figure.axes if each.get_visible() and each.get_subplotspec() is not None]
    if not axes:
        return
    grid = axes[0].get_gridspec()
    assert grid is not None
    columns = 2 if grid.ncols > 2 else 1
    lines = -(-len(axes) // columns)
    height = figure.get_figheight() / grid.nrows
    figure.set_size_inches(NARROW, lines * min(height, 2.9) if lines > 1 else height)
    places = figure.add_gridspec(lines, columns)
    for place, each in enumerate(axes):
        each.set_subplotspec(places[divmod(place, columns)])
        if grid.ncols > 1:  # a scale that was shared along a line
            each.tick_params(labelleft=place % columns == 0)
        each.set_xlabel(textwrap.fill(each.get_xlabel(), 36 // columns))
        each.set_title(textwrap.fill(each.get_title("left"), 40 // columns), loc="left")
        if isinstance(each.yaxis.get_major_formatter(), FixedFormatter):
            names = [text.get_text() for text in each.get_yticklabels()]
            each.set_yticks(each.get_yticks(), [n if len(n) <= 22 else f"…{n[-21:]}" for n in names])
    for legend in list(figure.legends):
        handles = [handle for handle in legend.legend_handles if handle is not None]
        labels = [text.get_text() for text in legend.get_texts()]
        legend.remove()
        _legend(figure, handles, labels, 46)
    figure.set_layout_engine(_layout())

"""Page of `topograd inspect`: conclusion, flat directions, residual stream, norm kernels, factor spectra.

It reads the plain record that `geometry.CheckpointReading.as_dict` gives, with the arguments of the command
beside it (`model`, `kind`, `step`, `text`). The page stands alone, like a report: no script, nothing
loaded, every text escaped, each figure described and with its numbers in a table. Panels without data are
listed at the end with the reason.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from topograd.report.drawing import INK, legend_below, look, new_figure, panels, powers
from topograd.report.figures import Panel
from topograd.report.markup import escape, table_html, tiles_html
from topograd.report.page import write_figures
from topograd.report.tables import Table, fixed, read_row, whole

FOUND, COMPARED = look(0, 2).colour, look(1, 2).colour
HEALTHY = {
    "residual stream": ("preserved", "preserved"),
    "weakest direction, last layer over input": ("8 to 33", "1.6"),
    "effective rank after the last layer, of the width": ("39 % to 73 %", "97 %"),
    "dead directions, of those followed": ("0 or 1", "1"),
    "layers whose inputs use every direction": ("84 % to all", "all"),
}
"""Readings of trained models and of an untrained one: `topograd inspect --scans 1` of the packaged model
(width 256, 3,600 steps), of the demo's staged and backprop runs (width 96, 400 steps), and of the staged run
at step 1."""
MAX_NAMES = 60  # directions whose names fit beside the figure


def write_geometry(path: Path, record: Mapping[str, Any]) -> Path:
    """Write the page and return its path. The same record gives the same bytes."""
    advice = "".join(f"<li>{escape(sentence)}</li>" for sentence in record["sentences"])
    conclusion = f'<ul class="advice">{advice}</ul>{table_html(_health(record))}'
    return write_figures(
        path,
        (f"Geometry of {record['model']}", _lead(record), _tiles(record)),
        lambda: [draw(record) for draw in (direction_panel, stream_panel, kernel_panel, spectra_panel)],
        before=[("advice", "Conclusion", conclusion)],
        after=[("missing", "Not measured", _missing(record))],
        saved=False,
    )


def _health(record: Mapping[str, Any]) -> Table:
    """The readings that can be judged, beside those of trained models and of one before its training."""
    readings: dict[str, str] = {}
    stream = record["stream_without_massive"] or record["stream"]
    if stream is not None:
        readings["residual stream"] = stream["verdict"]
        readings["weakest direction, last layer over input"] = f"{stream['ratios'][-1]:.2g}"
        rank = stream["effective_ranks"][-1] / stream["width"]
        readings["effective rank after the last layer, of the width"] = f"{rank:.0%}"
    followed = [one for one in record["directions"] if one["group"] is None]
    if followed:
        dead = sum(one["kind"] == "dead" for one in followed)
        readings["dead directions, of those followed"] = f"{dead} of {len(followed)}"
    if record["layers"]:
        full = sum(layer["A"]["rank"] == layer["A"]["size"] for layer in record["layers"].values())
        readings["layers whose inputs use every direction"] = f"{full} of {len(record['layers'])}"
    rows = tuple((name, here, *HEALTHY[name]) for name, here in readings.items())
    caption = (
        "Healthy is what the packaged model and two runs of topograd demo have, read in the same way; "
        "untrained is one of these runs at its first step. Other sizes and texts differ."
    )
    return Table(caption, ("reading", "here", "healthy", "untrained"), rows)


def _lead(record: Mapping[str, Any]) -> str:
    what = f"A model of type {record['kind']}"
    if record["kind"] == "run":
        what = f"A run of topograd at step {whole(record['step'])}"
    read = f"It was read on this text: {record['text']}."
    if record["fisher"] is None:
        how = "It has no labels here, so there are no gradients."
    else:
        how = f"Gradients are those of the {record['loss']} loss, for the {record['fisher']} Fisher matrix."
    return f"{what} with {whole(record['parameters'])} parameters. {read} {how} Nothing here is a rate."


def _tiles(record: Mapping[str, Any]) -> str:
    tiles = []
    if record["stream"] is not None:
        tiles.append(("the residual stream", record["stream"]["verdict"]))
    exact = [norm for norm in record["norms"].values() if norm["exact"]]
    if exact:
        seen = sum(norm["found"] for norm in exact)
        tiles.append(("LayerNorm kernels found on data", f"{seen} of {len(exact)}"))
    tiles.append(("layers with factors", whole(len(record["layers"]))))
    tiles.append(("parameters without factors", whole(len(record["uncovered"]))))
    return tiles_html(tiles)


def _missing(record: Mapping[str, Any]) -> str:
    notes = "".join(f"<li>{escape(words)}</li>" for words in record["refused"])
    reasons = f"<ul>{notes}</ul>" if notes else ""
    if not record["uncovered"]:
        return reasons or "<p>Nothing was left out.</p>"
    table = Table("Parameters without factors", ("parameter", "why"), tuple(record["uncovered"].items()))
    return reasons + table_html(table, "settings")


def stream_panel(record: Mapping[str, Any]) -> Panel:
    """σ_r and the effective rank, from the input to the last layer."""
    name, title = "stream", "The residual stream by depth"
    stream = record["stream"]
    if stream is None:
        return Panel(name, title, "Left out: the model has no residual stream that could be read.")
    ratios, ranks = [1.0, *stream["ratios"]], stream["effective_ranks"]
    depth = range(len(ratios))
    figure = new_figure(3.4)
    left, right = panels(figure, 2)
    shown = [ratio if ratio > 0 else math.nan for ratio in ratios]
    left.plot(depth, shown, color=FOUND, marker="o", markersize=5)
    powers(left, "y")
    low, high = _decades(shown)
    left.set_ylim(low, high)
    for place in (i for i, ratio in enumerate(ratios) if not ratio > 0):
        left.plot(place, low, marker="v", color=COMPARED, clip_on=False, linestyle="")
    left.set_title(f"σ_{stream['rank']}(H) over that of the input")
    right.plot(depth, ranks, color=FOUND, marker="o", markersize=5)
    without = record["stream_without_massive"]
    if without is not None:
        quiet = [ratio if ratio > 0 else math.nan for ratio in (1.0, *without["ratios"])]
        left.plot(depth, quiet, color=COMPARED, marker="s", markersize=4)
        low, high = _decades([*shown, *quiet])
        left.set_ylim(low, high)
        right.plot(depth, without["effective_ranks"], color=COMPARED, marker="s", markersize=4)
        ranks = [*ranks, *without["effective_ranks"]]
    right.set_ylim(0, 1.08 * max(ranks))
    right.set_title(f"Effective rank, of {whole(stream['width'])}")
    for axes in (left, right):
        axes.set_xlabel("layers passed")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    caption = (
        "Left: the weakest direction that the input uses, followed through the layers. Where every layer "
        "adds to the stream it should neither vanish nor dip; without skips it is lost exponentially. A "
        "triangle at the lower edge is a layer where it is below what the numbers resolve. Blocks that "
        "normalise the stream itself, as BERT's do, are outside the theory: for them this only describes. "
        "Right: over how many directions the activations spread. The verdict on the profile: "
        f"{stream['verdict']}."
    )
    if without is not None:
        caption += (
            " Squares leave out the rows with massive activations, which hide all others: read those. Their "
            f"verdict: {without['verdict']}."
        )
    table = stream_table(record)
    return Panel(name, title, caption, figure, "The stream by depth. " + read_row(table, -1), table)


def stream_table(record: Mapping[str, Any]) -> Table:
    """σ_r and the effective rank after each layer."""
    stream, without = record["stream"], record["stream_without_massive"]
    rows = [[label] for label in ("input", *stream["names"])]
    for one in (stream, without) if without is not None else (stream,):
        for row, ratio, rank in zip(rows, (1.0, *one["ratios"]), one["effective_ranks"], strict=True):
            row += [f"{ratio:.3g}", fixed(rank, 1)]
    more = ("without massive rows", "its effective rank") if without is not None else ()
    header = ("after", "σ_r over the input's", "effective rank", *more)
    caption = f"σ_{stream['rank']} of the stream: {stream['verdict']}"
    return Table(caption, header, tuple(map(tuple, rows)))


def direction_panel(record: Mapping[str, Any]) -> Panel:
    """The Fisher along every direction that was followed, by kind, with orders in the table."""
    name, title = "directions", "Flat directions, and why they are flat"
    every = record["directions"]
    followed = [one for one in every if one["fisher"] is not None and one["group"] is None]
    groups = [one for one in every if one["group"] is not None]
    table = direction_table(record)
    caption = (
        f"{len(groups)} groups of symmetries were found and taken out first: along them no network of this "
        "shape changes. Then each layer's flattest direction was followed outward from the "
        "checkpoint: live, if the divergence begins as a square (order 1); dead, if it begins later or not "
        "at all on this text. An order has the interval of its fit; a dash is one that was refused."
    )
    shown = [one for one in followed if one["fisher"] > 0]
    if not shown:
        return Panel(name, title, caption, None, f"{len(every)} directions.", table)
    figure = new_figure(1.1 + 0.17 * min(len(shown), MAX_NAMES))
    (axes,) = panels(figure, 1)
    for kind, colour, marker in (("live", FOUND, "o"), ("dead", COMPARED, "v")):
        points = [(one["fisher"], i) for i, one in enumerate(shown) if one["kind"] == kind]
        if points:
            axes.plot(
                *zip(*points, strict=True),
                color=colour,
                marker=marker,
                linestyle="",
                markersize=4,
                label=kind,
            )
    powers(axes, "x")
    axes.set(xlim=_decades([one["fisher"] for one in shown]), ylim=(len(shown) - 0.4, -0.6))
    named = range(0, len(shown), -(-len(shown) // MAX_NAMES))
    axes.set_yticks(named, [_short(shown[i]["layer"]) for i in named], fontsize=8)
    axes.set_xlabel("Fisher information along the direction")
    legend_below(figure, axes)
    words = f"The Fisher along {len(shown)} directions. " + read_row(table, -1)
    return Panel(name, title, caption, figure, words, table)


def direction_table(record: Mapping[str, Any]) -> Table:
    """Every direction, with its order, its Fisher information and its share."""
    header = ("layer", "kind", "order", "interval", "Fisher", "share", "dimensions", "group")
    return Table("Directions", header, tuple(map(_direction_cells, record["directions"])))


def _direction_cells(one: Mapping[str, Any]) -> tuple[str, ...]:
    interval, share = one["interval"], one["share"]
    around = share and share["interval"]
    span = f" ({around[0]:.3f} to {around[1]:.3f})" if around else ""
    return (
        one["layer"],
        one["kind"],
        "–" if one["order"] is None else whole(one["order"]),
        "–" if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}",
        "–" if one["fisher"] is None else f"{one['fisher']:.1e}",
        "–" if share is None else f"{share['value']:.3f}{span}",
        whole(one["dimensions"]),
        one["group"] or "",
    )


def _decades(values: list[float]) -> tuple[float, float]:
    """Limits of a logarithmic axis with some room, a decade at least."""
    known = [math.log10(value) for value in values if math.isfinite(value)]
    middle, half = (max(known) + min(known)) / 2, max((max(known) - min(known)) * 0.6, 0.5)
    return 10 ** (middle - half), 10 ** (middle + half)


def kernel_panel(record: Mapping[str, Any]) -> Panel:
    """How much of the outputs' variance lies in the direction that the gain names."""
    name, title = "kernels", "Kernels of the norms"
    norms = record["norms"]
    if not norms:
        return Panel(name, title, "Left out: the model has no LayerNorm or RMSNorm module that ran.")
    figure = new_figure(1.1 + 0.27 * len(norms))
    (axes,) = panels(figure, 1)
    floor = 1e-40
    for place, norm in enumerate(norms.values()):
        colour = FOUND if norm["exact"] else COMPARED
        share = max(norm["share"], floor)
        axes.plot(
            share, place, marker="o" if norm["exact"] else "s", color=colour, linestyle="", clip_on=False
        )
        words = f"|cos| {norm['cosine']:.6f}"
        axes.annotate(words, (1.02, place), xycoords=("axes fraction", "data"), va="center", color=INK)
    powers(axes, "x")
    axes.set(xlim=(floor, 1), ylim=(len(norms) - 0.4, -0.6))
    axes.set_yticks(range(len(norms)), [_short(label) for label in norms])
    axes.set_xlabel("share of the outputs' variance (circles: LayerNorm, squares: RMSNorm)")
    caption = (
        "A LayerNorm subtracts the mean, so its outputs never vary along one direction, which its gain alone "
        "fixes. The number on the right compares that direction with the flattest one of the data: 1 is the "
        "same. Gains that have decayed to nothing are flat directions of their own, and then the kernel has "
        "as many dimensions. RMSNorm has no such direction and is shown for comparison. A share left of the "
        "edge is drawn at it."
    )
    seen = sum(norm["found"] for norm in norms.values())
    alt = f"{seen} of {len(norms)} kernels are found on data."
    return Panel(name, title, caption, figure, alt, kernel_table(record))


def kernel_table(record: Mapping[str, Any]) -> Table:
    """Each norm's kernel, and how far the data agree with it."""
    cells = []
    for label, norm in record["norms"].items():
        size = whole(norm["dimensions"]) if norm["exact"] else "none"
        cells.append((label, size, f"{norm['cosine']:.6f}", f"{norm['share']:.1e}"))
    header = ("norm", "dimensions of the kernel", "|cos|", "share of the variance")
    return Table("γ's direction against the outputs", header, tuple(cells))


def spectra_panel(record: Mapping[str, Any]) -> Panel:
    """The eigenvalues of A and of G, one line for each layer."""
    name, title = "spectra", "Spectra by layer"
    layers = record["layers"]
    if not layers:
        return Panel(name, title, "Left out: no layer of the model has factors.")
    sides = _sides(record)
    figure = new_figure(4.0)
    axes = panels(figure, len(sides), sharey=True)
    words = {"A": "A: what enters a layer", "G": "G: the gradients that leave it"}
    for side, axis in zip(sides, axes, strict=True):
        _spectra(axis, {label: layer[side] for label, layer in layers.items()})
        axis.set_title(words[side])
        axis.set_xlabel("place, from largest to smallest")
    axes[0].set_ylabel("eigenvalue over the largest")
    legend_below(figure, axes[0])
    caption = (
        "Eigenvalues of the Kronecker factors, each over its largest; later layers are darker. A line "
        "that ends early has eigenvalues below what the model's numbers resolve (about "
        f"{record['resolution']:.0e} of the largest): "
        "directions that no input uses, or along which no gradient comes. A softmax head always has one such "
        "direction in G. The table gives, for each layer, how many are above that, and over how many the "
        "spectrum spreads."
    )
    table = spectra_table(record)
    alt = f"Spectra of {len(layers)} layers. " + read_row(table, -1)
    return Panel(name, title, caption, figure, alt, table)


def _sides(record: Mapping[str, Any]) -> tuple[str, ...]:
    return ("A", "G") if record["fisher"] is not None else ("A",)


def spectra_table(record: Mapping[str, Any]) -> Table:
    """Size, rank and effective rank of every layer's factors."""
    sides, words = _sides(record), ("size", "rank", "effective rank")
    cells = []
    for label, layer in record["layers"].items():
        found = [layer[side] for side in sides]
        numbers = ((whole(s["size"]), whole(s["rank"]), fixed(s["effective_rank"], 1)) for s in found)
        cells.append((label, *(number for each in numbers for number in each)))
    fisher = f"{record['fisher']} Fisher" if record["fisher"] else "no loss, so no G"
    header = ("layer", *(f"{side}: {word}" for side in sides for word in words))
    return Table(f"Factors ({fisher})", header, tuple(cells))


def _spectra(axes: Axes, spectra: Mapping[str, Mapping[str, Any]]) -> None:
    """One line for each layer, pale for the first and dark for the last; some are named."""
    named = {0, len(spectra) // 2, len(spectra) - 1}
    colours = matplotlib.colormaps["viridis_r"]
    for i, (label, spectrum) in enumerate(spectra.items()):
        largest = spectrum["values"][0]
        pairs = zip(spectrum["places"], spectrum["values"], strict=True)
        shown = [
            (place / max(spectrum["size"] - 1, 1), value / largest) for place, value in pairs if value > 0
        ]
        if shown:
            colour = colours(0.05 + 0.95 * i / max(len(spectra) - 1, 1))
            name = _short(label) if i in named else None
            axes.plot(*zip(*shown, strict=True), color=colour, linewidth=1.3, label=name)
    powers(axes, "y")
    axes.set_xlim(0, 1)


def _short(label: str, most: int = 34) -> str:
    """A long name, cut to its end; of a joint direction the first layer."""
    label = label.split(",")[0]
    return label if len(label) <= most else "…" + label[1 - most :]
